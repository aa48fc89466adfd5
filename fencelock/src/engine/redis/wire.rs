//! A connection that many tasks use at the same time.
//!
//! Whoever has something to send writes it to the socket itself, at once. One task reads what comes, gives answers to those who
//! wait for them, in the order of their requests, and writes what the socket would not take.

use super::resp::{Frame, read};
use redis::aio::ConnectionLike;
use redis::{Cmd, Pipeline, RedisError, RedisFuture, RedisResult, Value};
use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::oneshot;

/// What comes without having been asked for.
#[derive(Debug)]
pub(in crate::engine) enum News {
    /// The server says something: what kind of thing, and the thing itself.
    Push(Vec<Value>),
    /// The connection broke.
    Broken,
}

const ENDED: &str = "nobody reads from the connection any more";

/// Who is told the news. It must not take long.
pub(in crate::engine) type Listener = Box<dyn Fn(News) + Send + Sync>;

/// The answers to what was sent together, when they have come.
pub(in crate::engine) struct Told {
    answers: oneshot::Receiver<RedisResult<Vec<Value>>>,
    timeout: Duration,
}

pub(super) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// A connection. It ends when the last clone is dropped.
#[derive(Clone)]
pub(in crate::engine) struct Wire {
    line: Arc<Line>,
    timeout: Duration,
    db: i64,
}

/// The end of the line that is held by those who send.
struct Line(Arc<Mutex<State>>);

impl Drop for Line {
    fn drop(&mut self) {
        let mut state = lock(&self.0);
        state.is_closing = true;
        state.driver.wake_by_ref();
    }
}

struct State {
    stream: Box<dyn Stream>,
    /// What the socket did not take yet.
    out: VecDeque<u8>,
    expected: VecDeque<Expected>,
    /// Wakes the task that reads.
    driver: Waker,
    is_closing: bool,
    /// Why nothing can be sent any more.
    broken: Option<(io::ErrorKind, String)>,
}

/// Answers that have not come yet.
struct Expected {
    count: usize,
    values: Vec<Value>,
    /// It is not answered but confirmed: by a push of this kind, about this channel.
    confirmed: Option<(String, String)>,
    tell: oneshot::Sender<RedisResult<Vec<Value>>>,
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Wire {
    /// Takes over a stream. An answer that does not come within `timeout` is not waited for any longer.
    pub(super) fn new(stream: impl Stream + 'static, timeout: Duration, db: i64, listener: Listener) -> Self {
        let state = Arc::new(Mutex::new(State {
            stream: Box::new(stream),
            out: VecDeque::new(),
            expected: VecDeque::new(),
            driver: Waker::noop().clone(),
            is_closing: false,
            broken: None,
        }));
        tokio::spawn(Driver { state: Arc::clone(&state), arrived: Arrived::default(), listener });
        Self { line: Arc::new(Line(state)), timeout, db }
    }

    /// Sends one command and returns its answer.
    pub(in crate::engine) async fn call(&self, command: &Cmd) -> RedisResult<Value> {
        let values = answered(self.send(&command.get_packed_command(), 1)).await?;
        values.into_iter().next().ok_or_else(|| broken((io::ErrorKind::InvalidData, String::new())))
    }

    /// Sends several commands together and returns their answers.
    pub(in crate::engine) async fn call_all(&self, commands: &Pipeline) -> RedisResult<Vec<Value>> {
        answered(self.send(&commands.get_packed_pipeline(), commands.len())).await
    }

    /// Sends something that has so many answers.
    pub(in crate::engine) fn send(&self, packed: &[u8], answers: usize) -> Told {
        self.put(packed, answers, None)
    }

    /// Sends a command about the subscription to one channel.
    pub(in crate::engine) fn subscribe(&self, command: &str, channel: &str) -> Told {
        let confirmed = (command.to_ascii_lowercase(), channel.to_owned());
        self.put(&redis::cmd(command).arg(channel).get_packed_command(), 1, Some(confirmed))
    }

    fn put(&self, packed: &[u8], count: usize, confirmed: Option<(String, String)>) -> Told {
        let (tell, answers) = oneshot::channel();
        let told = Told { answers, timeout: self.timeout };
        let mut state = lock(&self.line.0);
        if let Some(why) = &state.broken {
            let _ = tell.send(Err(broken(why.clone())));
            return told;
        }
        let values = Vec::with_capacity(count);
        state.expected.push_back(Expected { count, values, confirmed, tell });
        let mut rest = packed;
        // Nobody is woken by this when the socket takes more: the task that reads tries again, and waits for it.
        let mut attempt = Context::from_waker(Waker::noop());
        if state.out.is_empty() {
            while let (false, Poll::Ready(Ok(length @ 1..))) =
                (rest.is_empty(), Pin::new(&mut state.stream).poll_write(&mut attempt, rest))
            {
                rest = &rest[length..];
            }
        }
        let flushed = rest.is_empty() && Pin::new(&mut state.stream).poll_flush(&mut attempt).is_ready();
        state.out.extend(rest);
        if !flushed {
            state.driver.wake_by_ref();
        }
        told
    }
}

/// Waits for answers. The time is taken here: the task that reads may belong to a runtime that does not run.
pub(in crate::engine) async fn answered(told: Told) -> RedisResult<Vec<Value>> {
    match tokio::time::timeout(told.timeout, told.answers).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(_)) => Err(broken((io::ErrorKind::ConnectionAborted, ENDED.into()))),
        Err(_) => Err(io::Error::from(io::ErrorKind::TimedOut).into()),
    }
}

fn broken((kind, why): (io::ErrorKind, String)) -> RedisError {
    io::Error::new(kind, why).into()
}

impl ConnectionLike for Wire {
    fn req_packed_command<'a>(&'a mut self, command: &'a Cmd) -> RedisFuture<'a, Value> {
        Box::pin(self.call(command))
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        commands: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        Box::pin(async move {
            let answers = answered(self.send(&commands.get_packed_pipeline(), offset + count)).await?;
            Ok(answers.into_iter().skip(offset).collect())
        })
    }

    fn get_db(&self) -> i64 {
        self.db
    }
}

/// The task that reads.
struct Driver {
    state: Arc<Mutex<State>>,
    arrived: Arrived,
    listener: Listener,
}

impl Future for Driver {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        match self.work(cx) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Ok(())) => Poll::Ready(()),
            Poll::Ready(Err(error)) => {
                self.end(error.kind(), &error.to_string());
                (self.listener)(News::Broken);
                Poll::Ready(())
            }
        }
    }
}

impl Driver {
    /// Until the connection breaks, or nobody has it any more.
    fn work(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            let arrived = {
                let mut state = lock(&self.state);
                state.driver.clone_from(cx.waker());
                let written = state.write(cx)?;
                if state.is_closing && written.is_ready() {
                    return Poll::Ready(Ok(()));
                }
                state.read(cx, &mut self.arrived)?
            };
            if arrived.is_pending() {
                return Poll::Pending;
            }
            self.understand()?;
        }
    }

    /// Gives what has arrived to whom it is for.
    fn understand(&mut self) -> io::Result<()> {
        let frames = self.arrived.frames().map_err(io::Error::other)?;
        let (mut done, mut news) = (Vec::new(), Vec::new());
        let mut state = lock(&self.state);
        for frame in frames {
            match frame {
                Frame::Answer(value) => {
                    let Some(first) = state.expected.front_mut() else {
                        return Err(io::Error::new(io::ErrorKind::InvalidData, "an answer that nobody has asked for"));
                    };
                    first.values.push(value);
                    if first.values.len() >= first.count {
                        done.extend(state.expected.pop_front());
                    }
                }
                Frame::Push(values) if state.expected.front().is_some_and(|first| first.is_confirmed_by(&values)) => {
                    done.extend(state.expected.pop_front());
                }
                Frame::Push(values) => news.push(values),
            }
        }
        drop(state);
        news.into_iter().for_each(|values| (self.listener)(News::Push(values)));
        for Expected { tell, values, .. } in done {
            let _ = tell.send(Ok(values));
        }
        Ok(())
    }

    fn end(&self, kind: io::ErrorKind, why: &str) {
        let expected = {
            let mut state = lock(&self.state);
            state.broken.get_or_insert((kind, why.to_owned()));
            std::mem::take(&mut state.expected)
        };
        for Expected { tell, .. } in expected {
            let _ = tell.send(Err(broken((kind, why.to_owned()))));
        }
    }
}

impl Drop for Driver {
    /// Its runtime may be going away: whoever waits is told.
    fn drop(&mut self) {
        self.end(io::ErrorKind::ConnectionAborted, ENDED);
    }
}

impl State {
    /// Writes what is left to be written. Pending if the socket does not take it.
    fn write(&mut self, cx: &mut Context<'_>) -> io::Result<Poll<()>> {
        while !self.out.is_empty() {
            let (first, _) = self.out.as_slices();
            match Pin::new(&mut self.stream).poll_write(cx, first)? {
                Poll::Ready(0) => return Err(io::ErrorKind::WriteZero.into()),
                Poll::Ready(length) => drop(self.out.drain(..length)),
                Poll::Pending => return Ok(Poll::Pending),
            }
        }
        Ok(Pin::new(&mut self.stream).poll_flush(cx)?)
    }

    /// Adds to what has arrived.
    fn read(&mut self, cx: &mut Context<'_>, arrived: &mut Arrived) -> io::Result<Poll<()>> {
        let mut room = ReadBuf::new(arrived.room());
        if Pin::new(&mut self.stream).poll_read(cx, &mut room)?.is_pending() {
            return Ok(Poll::Pending);
        }
        match room.filled().len() {
            0 => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the server has closed the connection")),
            length => {
                arrived.length += length;
                Ok(Poll::Ready(()))
            }
        }
    }
}

/// What has arrived and is not understood yet.
#[derive(Default)]
struct Arrived {
    bytes: Vec<u8>,
    length: usize,
}

impl Arrived {
    /// Where more of it goes.
    fn room(&mut self) -> &mut [u8] {
        const LEAST: usize = 16 * 1024;
        if self.bytes.len() < self.length + LEAST {
            // A long answer makes it grow by more each time, since it is read from its beginning each time.
            self.bytes.resize(self.length * 2 + 2 * LEAST, 0);
        }
        &mut self.bytes[self.length..]
    }

    /// All that is there as a whole.
    fn frames(&mut self) -> RedisResult<Vec<Frame>> {
        let (mut at, mut frames) = (0, Vec::new());
        while let Some((frame, length)) = read(&self.bytes[at..self.length])? {
            at += length;
            frames.push(frame);
        }
        self.bytes.copy_within(at..self.length, 0);
        self.length -= at;
        Ok(frames)
    }
}

impl Expected {
    fn is_confirmed_by(&self, push: &[Value]) -> bool {
        let is = |index: usize, text: &str| match push.get(index) {
            Some(Value::BulkString(bytes)) => bytes == text.as_bytes(),
            Some(Value::SimpleString(known)) => known == text,
            _ => false,
        };
        self.confirmed.as_ref().is_some_and(|(kind, channel)| is(0, kind) && is(1, channel))
    }
}

#[cfg(test)]
mod tests {
    use super::super::link::confirmed;
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
    use tokio::sync::mpsc;

    /// A connection, the server's end of it, and the news.
    fn pair(room: usize) -> (Wire, DuplexStream, mpsc::UnboundedReceiver<News>) {
        let (ours, theirs) = duplex(room);
        let (tell, news) = mpsc::unbounded_channel();
        let listener = Box::new(move |one| drop(tell.send(one)));
        (Wire::new(ours, Duration::from_secs(2), 0, listener), theirs, news)
    }

    async fn arrives(server: &mut DuplexStream, bytes: &[u8]) {
        let mut seen = vec![0; bytes.len()];
        server.read_exact(&mut seen).await.expect("it arrives");
        assert_eq!(seen, bytes);
    }

    #[tokio::test]
    async fn answers_go_to_those_who_asked_in_their_order() {
        let (wire, mut server, _news) = pair(4096);
        let (one, two, three) = (wire.send(b"one", 1), wire.send(b"two", 2), wire.send(b"three", 1));
        arrives(&mut server, b"onetwothree").await;
        // In pieces, as they may come.
        for part in [":1\r", "\n:2\r\n", ":3\r\n:", "4\r\n"] {
            server.write_all(part.as_bytes()).await.unwrap();
            tokio::task::yield_now().await;
        }
        assert_eq!(answered(one).await.unwrap(), [Value::Int(1)]);
        assert_eq!(answered(two).await.unwrap(), [Value::Int(2), Value::Int(3)]);
        assert_eq!(answered(three).await.unwrap(), [Value::Int(4)]);
    }

    /// A node whose slot has moved away ends subscriptions by itself, at any time.
    #[tokio::test]
    async fn what_is_said_of_subscriptions_is_not_taken_for_an_answer() {
        let (wire, mut server, mut news) = pair(4096);
        let asked = wire.send(b"ask", 1);
        let begins = wire.subscribe("SSUBSCRIBE", "mine");
        let refused = wire.subscribe("SSUBSCRIBE", "theirs");
        let last = wire.send(b"ask", 1);
        let ended = ">3\r\n$12\r\nsunsubscribe\r\n$4\r\nmine\r\n:0\r\n";
        let begun = ">3\r\n$10\r\nssubscribe\r\n$4\r\nmine\r\n:1\r\n";
        let words = format!("{ended}:7\r\n{ended}{begun}-MOVED 1 h:1\r\n{ended}:8\r\n");
        server.write_all(words.as_bytes()).await.unwrap();
        assert_eq!(answered(asked).await.unwrap(), [Value::Int(7)]);
        confirmed(begins).await.unwrap();
        assert_eq!(confirmed(refused).await.unwrap_err().code(), Some("MOVED"));
        assert_eq!(answered(last).await.unwrap(), [Value::Int(8)]);
        for _ in 0..3 {
            assert!(matches!(news.recv().await, Some(News::Push(values)) if values.len() == 3));
        }
        assert!(news.try_recv().is_err(), "what was asked for is no news");
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_does_not_come_is_not_waited_for() {
        let (wire, mut server, _news) = pair(4096);
        let (one, two) = (wire.send(b"one", 1), wire.send(b"two", 1));
        assert!(answered(one).await.unwrap_err().is_timeout());
        // It comes late, and is not taken for the next one.
        server.write_all(b":1\r\n:2\r\n").await.unwrap();
        assert_eq!(answered(two).await.unwrap(), [Value::Int(2)]);
    }

    /// The connection was made on a runtime that does not run any more.
    #[tokio::test(start_paused = true)]
    async fn a_task_that_does_not_read_keeps_nobody_waiting() {
        let stopped = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (wire, _server, _news) = {
            let _on = stopped.enter();
            pair(4096)
        };
        assert!(answered(wire.send(b"ask", 1)).await.unwrap_err().is_timeout());
        stopped.shutdown_background();
    }

    #[tokio::test]
    async fn what_the_socket_does_not_take_is_sent_later() {
        let (wire, mut server, _news) = pair(10);
        let bytes: Vec<u8> = (0..=255).cycle().take(10_000).collect();
        let (one, two) = (wire.send(&bytes, 1), wire.send(b"end", 1));
        arrives(&mut server, &bytes).await;
        arrives(&mut server, b"end").await;
        server.write_all(b"+OK\r\n+OK\r\n").await.unwrap();
        assert_eq!(answered(one).await.unwrap(), [Value::Okay]);
        assert_eq!(answered(two).await.unwrap(), [Value::Okay]);
    }

    #[tokio::test]
    async fn the_connection_ends_with_its_last_user_or_its_server() {
        let (wire, mut server, mut news) = pair(4096);
        drop(wire.clone());
        drop(wire.send(b"bye", 1));
        drop(wire);
        arrives(&mut server, b"bye").await;
        assert_eq!(server.read(&mut [0; 8]).await.unwrap(), 0, "it is closed");
        assert!(news.recv().await.is_none(), "nobody needs to be told");

        let (wire, server, mut news) = pair(4096);
        let asked = wire.send(b"ask", 1);
        drop(server);
        assert!(answered(asked).await.is_err());
        assert!(matches!(news.recv().await, Some(News::Broken)));
    }

    #[test]
    fn whoever_waits_is_told_when_the_runtime_goes_away() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (wire, _server, _news) = runtime.block_on(async { pair(4096) });
        let asked = wire.send(b"ask", 1);
        drop(runtime);
        assert!(matches!(asked.answers.blocking_recv(), Ok(Err(_))));
        assert!(matches!(wire.send(b"ask", 1).answers.blocking_recv(), Ok(Err(_))), "nobody will answer this, either");
    }

    #[tokio::test]
    async fn an_answer_that_nobody_has_asked_for_breaks_the_connection() {
        let (_wire, mut server, mut news) = pair(4096);
        server.write_all(b":1\r\n").await.unwrap();
        assert!(matches!(news.recv().await, Some(News::Broken)));
    }
}
