//! Reads what a Redis server sends (RESP3).

use redis::{RedisResult, Value};

/// One thing that a server has sent.
#[derive(Debug, PartialEq)]
pub(super) enum Frame {
    /// The answer to the oldest request that has none yet.
    Answer(Value),
    /// Not asked for, or about a subscription. What kind of thing it is comes first.
    Push(Vec<Value>),
}

/// Why there is no frame.
#[derive(Debug)]
enum Short {
    /// The rest of it is still on its way.
    Incomplete,
    /// This is not what a Redis server says.
    Nonsense,
}

/// How deep answers may be nested: deeper ones are nonsense.
const DEPTH: usize = 16;

/// The first frame of what has arrived, and how long it is; `None` if it is not all there.
pub(super) fn read(bytes: &[u8]) -> RedisResult<Option<(Frame, usize)>> {
    let mut reader = Reader { bytes, at: 0 };
    match reader.frame() {
        Ok(frame) => Ok(Some((frame, reader.at))),
        Err(Short::Incomplete) => Ok(None),
        Err(Short::Nonsense) => Err((redis::ErrorKind::Parse, "this is not what a Redis server says").into()),
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn frame(&mut self) -> Result<Frame, Short> {
        if self.bytes.get(self.at) == Some(&b'>') {
            self.at += 1;
            let count = self.length()?.ok_or(Short::Nonsense)?;
            return Ok(Frame::Push(self.values(count, DEPTH)?));
        }
        Ok(Frame::Answer(self.value(DEPTH)?))
    }

    fn value(&mut self, depth: usize) -> Result<Value, Short> {
        let depth = depth.checked_sub(1).ok_or(Short::Nonsense)?;
        let start = self.at;
        let kind = *self.bytes.get(self.at).ok_or(Short::Incomplete)?;
        self.at += 1;
        Ok(match kind {
            b':' => Value::Int(number(self.line()?)?),
            b'$' => {
                self.length()?.map_or(Ok(Value::Nil), |length| Ok(Value::BulkString(self.bulk(length)?.to_vec())))?
            }
            b'*' => self.length()?.map_or(Ok(Value::Nil), |count| Ok(Value::Array(self.values(count, depth)?)))?,
            b'+' => match self.line()? {
                b"OK" => Value::Okay,
                text => Value::SimpleString(String::from_utf8_lossy(text).into_owned()),
            },
            b'-' => {
                self.line()?;
                error(&self.bytes[start..self.at])?
            }
            b'!' => {
                let length = self.length()?.ok_or(Short::Nonsense)?;
                error(&[b"-", self.bulk(length)?, b"\r\n"].concat())?
            }
            b'_' => {
                self.line()?;
                Value::Nil
            }
            b'#' => Value::Boolean(self.line()? == b"t"),
            b',' => Value::Double(text(self.line()?)?.parse().map_err(|_| Short::Nonsense)?),
            b'(' => Value::SimpleString(text(self.line()?)?.to_owned()),
            b'=' => {
                // Its first four bytes say what the text is written in.
                let length = self.length()?.ok_or(Short::Nonsense)?;
                Value::BulkString(self.bulk(length)?.get(4..).ok_or(Short::Nonsense)?.to_vec())
            }
            b'~' => {
                let count = self.length()?.ok_or(Short::Nonsense)?;
                Value::Set(self.values(count, depth)?)
            }
            b'%' => Value::Map(self.pairs(depth)?),
            b'|' => {
                // Remarks about the value that follows.
                self.pairs(depth)?;
                self.value(depth)?
            }
            _ => return Err(Short::Nonsense),
        })
    }

    fn values(&mut self, count: usize, depth: usize) -> Result<Vec<Value>, Short> {
        // Room for what can be there, whatever the server says.
        let mut values = Vec::with_capacity(count.min(self.bytes.len() - self.at));
        for _ in 0..count {
            values.push(self.value(depth)?);
        }
        Ok(values)
    }

    fn pairs(&mut self, depth: usize) -> Result<Vec<(Value, Value)>, Short> {
        let count = self.length()?.ok_or(Short::Nonsense)?;
        let mut pairs = Vec::new();
        for _ in 0..count {
            pairs.push((self.value(depth)?, self.value(depth)?));
        }
        Ok(pairs)
    }

    /// A length; `None` stands for nothing at all.
    fn length(&mut self) -> Result<Option<usize>, Short> {
        let length = number(self.line()?)?;
        if length == -1 { Ok(None) } else { usize::try_from(length).map(Some).map_err(|_| Short::Nonsense) }
    }

    fn bulk(&mut self, length: usize) -> Result<&'a [u8], Short> {
        let end = self.at.checked_add(length).ok_or(Short::Nonsense)?;
        let bytes = self.bytes.get(self.at..end).ok_or(Short::Incomplete)?;
        match self.bytes.get(end..end + 2) {
            None => Err(Short::Incomplete),
            Some(b"\r\n") => {
                self.at = end + 2;
                Ok(bytes)
            }
            Some(_) => Err(Short::Nonsense),
        }
    }

    /// Up to the end of the line, without it.
    fn line(&mut self) -> Result<&'a [u8], Short> {
        let rest = &self.bytes[self.at..];
        let end = rest.windows(2).position(|two| two == b"\r\n").ok_or(Short::Incomplete)?;
        self.at += end + 2;
        Ok(&rest[..end])
    }
}

fn text(line: &[u8]) -> Result<&str, Short> {
    std::str::from_utf8(line).map_err(|_| Short::Nonsense)
}

fn number(line: &[u8]) -> Result<i64, Short> {
    text(line)?.parse().map_err(|_| Short::Nonsense)
}

/// An error, which is read as its own client would.
fn error(line: &[u8]) -> Result<Value, Short> {
    redis::parse_redis_value(line).map_err(|_| Short::Nonsense)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(text: &str) -> Value {
        match read(text.as_bytes()) {
            Ok(Some((Frame::Answer(value), length))) if length == text.len() => value,
            other => panic!("{text:?}: {other:?}"),
        }
    }

    #[test]
    fn answers_are_read() {
        let bulk = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        assert_eq!(answer("+OK\r\n"), Value::Okay);
        assert_eq!(answer("+QUEUED\r\n"), Value::SimpleString("QUEUED".into()));
        assert_eq!(answer(":-7\r\n"), Value::Int(-7));
        assert_eq!(answer("$3\r\na\r\n\r\n"), bulk("a\r\n"));
        assert_eq!(answer("$0\r\n\r\n"), bulk(""));
        assert_eq!(answer("$-1\r\n"), Value::Nil);
        assert_eq!(answer("_\r\n"), Value::Nil);
        assert_eq!(answer("*-1\r\n"), Value::Nil);
        assert_eq!(
            answer("*2\r\n:1\r\n*1\r\n$1\r\nx\r\n"),
            Value::Array(vec![Value::Int(1), Value::Array(vec![bulk("x")])])
        );
        assert_eq!(answer("%1\r\n+a\r\n:1\r\n"), Value::Map(vec![(Value::SimpleString("a".into()), Value::Int(1))]));
        assert_eq!(answer("~1\r\n#t\r\n"), Value::Set(vec![Value::Boolean(true)]));
        assert_eq!(answer(",1.5\r\n"), Value::Double(1.5));
        assert_eq!(answer("=7\r\ntxt:abc\r\n"), bulk("abc"));
        assert_eq!(answer("|1\r\n+a\r\n:1\r\n:2\r\n"), Value::Int(2));
        for error in ["-MOVED 7 127.0.0.1:1\r\n", "!20\r\nMOVED 7 127.0.0.1:1 \r\n"] {
            let told = answer(error).extract_error().expect_err("an error");
            assert_eq!((told.code(), told.redirect_node().map(|(_, slot)| slot)), (Some("MOVED"), Some(7)), "{error}");
        }
        assert_eq!(
            read(b">2\r\n+message\r\n:1\r\n+rest").expect("it makes sense"),
            Some((Frame::Push(vec![Value::SimpleString("message".into()), Value::Int(1)]), 18))
        );
    }

    #[test]
    fn what_is_not_all_there_is_waited_for() {
        let whole = b"*3\r\n$5\r\nab\r\nc\r\n%1\r\n+x\r\n:12\r\n-ERR no\r\n";
        for end in 0..whole.len() {
            assert_eq!(read(&whole[..end]).expect("it makes sense so far"), None, "{end} bytes");
        }
        assert!(matches!(read(whole), Ok(Some((Frame::Answer(_), length))) if length == whole.len()));
    }

    #[test]
    fn nonsense_is_noticed() {
        let deep = "*1\r\n".repeat(100);
        for text in
            ["HTTP/1.1 400 Bad Request\r\n", ":x\r\n", "$2\r\nabcd\r\n", "$-2\r\n", "*99999999999999999999\r\n", &deep]
        {
            assert!(read(text.as_bytes()).is_err(), "{text:?}");
        }
        // As many as it says are waited for, and take no room before they are there.
        assert_eq!(read(b"*9223372036854775807\r\n").expect("it may come"), None);
    }
}
