//! The gate as its users meet it: every test starts the real binary, before a real server.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod harness;
mod lost_update;
mod upstream;

use fencelock_testkit::web;
use harness::{Gate, Place, until};
use rustix::process::Signal;
use std::io::{Read, Write};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

#[test]
fn an_older_token_is_refused_and_nothing_reaches_the_upstream() {
    let place = Place::new(&[]);
    assert_eq!(place.put("/a", 5, "five").status, 200);
    assert_eq!(place.put("/a", 5, "five again").status, 200, "the same holder writes twice");
    let late = place.put("/a", 4, "four");
    assert_eq!(late.status, 412);
    assert_eq!(late.header("fencing-token"), Some("5"), "it tells the newest");
    assert!(late.text().contains("token 4") && late.text().contains("token 5"), "{}", late.text());
    assert_eq!(place.upstream.value("/a").unwrap(), b"five again");
    assert_eq!(place.upstream.seen().len(), 2, "the refused one was not handed on");
    assert_eq!(place.put("/b", 1, "another").status, 200, "another resource has a line of its own");
    let refused = place.gate.says("refused");
    assert_eq!((&refused["status"], &refused["path"]), (&412.into(), &"/a".into()));
}

#[test]
fn no_token_is_428_and_a_malformed_one_400() {
    let place = Place::new(&[]);
    assert_eq!(place.send("PUT", "/a", None, b"x").status, 428);
    assert_eq!(place.send("GET", "/a", None, b"").status, 428);
    let huge = "9".repeat(5_000);
    for bad in
        ["-1", "+1", "", "abc", "1.0", "0x1", "18446744073709551616", "99999999999999999999999", "1, 2", "01", &huge]
    {
        let reply = place.send("PUT", "/a", Some(bad), b"x");
        assert_eq!(reply.status, 400, "{bad:.30}: {}", reply.text());
    }
    let twice = [("Fencing-Token", "1"), ("fencing-token", "1")];
    assert_eq!(web::send(&place.gate.address, "PUT", "/a", &twice, b"x").unwrap().status, 400);
    // More than fits into the head of a request.
    let flood = "9".repeat(100_000);
    let reply = place.send("PUT", "/a", Some(&flood), b"x");
    assert!([400, 431].contains(&reply.status), "{}", reply.status);
    assert!(place.upstream.seen().is_empty(), "nothing was handed on");
    assert_eq!(place.send("PUT", "/a", Some("18446744073709551615"), b"x").status, 200, "the greatest token");
}

#[test]
fn kill_9_loses_no_token_that_was_let_in() {
    let mut place = Place::new(&[]);
    for round in 1..=5_u64 {
        let over = Arc::new(AtomicBool::new(false));
        let writers: Vec<_> = (0..4)
            .map(|writer| {
                let (address, over) = (place.gate.address.clone(), Arc::clone(&over));
                std::thread::spawn(move || {
                    let mut newest = 0;
                    for token in (round * 100_000).. {
                        let path = format!("/{writer}");
                        let header = token.to_string();
                        let sent = web::send(&address, "PUT", &path, &[("Fencing-Token", &header)], header.as_bytes());
                        match sent {
                            Ok(reply) if reply.status == 200 => newest = token,
                            _ if over.load(Ordering::Acquire) => break,
                            other => panic!("{other:?}"),
                        }
                    }
                    newest
                })
            })
            .collect();
        let seen = || place.upstream.seen().len();
        let before = seen();
        until("some writes", || (seen() > before + 40).then_some(()));
        over.store(true, Ordering::Release);
        place.crash();
        for (writer, thread) in writers.into_iter().enumerate() {
            let newest: u64 = thread.join().unwrap();
            assert!(newest > 0);
            // What the upstream has is what was let in, also when the answer was not seen.
            let kept = place.upstream.value(&format!("/{writer}")).unwrap();
            let kept: u64 = String::from_utf8(kept).unwrap().parse().unwrap();
            assert!(kept >= newest);
            assert_eq!(
                place.put(&format!("/{writer}"), kept - 1, "old").status,
                412,
                "round {round}: {kept} was forgotten"
            );
        }
    }
}

#[test]
fn a_newer_token_waits_until_the_older_request_is_over() {
    let place = Place::new(&["--drain", "60s"]);
    place.upstream.hold("/a");
    let sender = |token: u64, body: &'static str| {
        let address = place.gate.address.clone();
        std::thread::spawn(move || {
            web::send(&address, "PUT", "/a", &[("Fencing-Token", &token.to_string())], body.as_bytes()).unwrap()
        })
    };
    let old = sender(1, "one");
    until("the old request at the upstream", || (place.upstream.seen().len() == 1).then_some(()));
    let newer = sender(2, "two");
    // As soon as the newer one has been announced, the older one is shut out.
    until("the newer one's announcement", || (place.put("/a", 0, "zero").text().contains("token 2")).then_some(()));
    assert_eq!(place.put("/a", 1, "one again").status, 412);
    assert!(!newer.is_finished());
    assert_eq!(place.upstream.seen().len(), 1, "the newer one is not on its way yet");
    place.upstream.let_go("/a");
    assert_eq!(old.join().unwrap().status, 200, "what was let in comes to its end");
    assert_eq!(newer.join().unwrap().status, 200);
    assert_eq!(place.upstream.value("/a").unwrap(), b"two");
}

#[test]
fn a_client_that_went_away_is_waited_for_like_any_other() {
    let place = Place::new(&["--drain", "60s"]);
    place.upstream.hold("/a");
    let mut old = web::begin(&place.gate.address, "PUT", "/a", &[("Fencing-Token", "1")], Some(3)).unwrap();
    old.write_all(b"one").unwrap();
    until("the old request at the upstream", || (place.upstream.seen().len() == 1).then_some(()));
    drop(old);
    let address = place.gate.address.clone();
    let newer =
        std::thread::spawn(move || web::send(&address, "PUT", "/a", &[("Fencing-Token", "2")], b"two").unwrap());
    until("the newer one's announcement", || (place.put("/a", 0, "zero").text().contains("token 2")).then_some(()));
    // The upstream is still at work on the old one: whoever goes by the client's connection lets the newer one pass here.
    std::thread::sleep(std::time::Duration::from_millis(200));
    assert_eq!(place.upstream.seen().len(), 1);
    place.upstream.let_go("/a");
    assert_eq!(newer.join().unwrap().status, 200);
    assert_eq!(place.upstream.value("/a").unwrap(), b"two");
}

#[test]
fn an_older_request_that_takes_too_long_is_cut_off_and_never_completed() {
    let place = Place::new(&["--drain", "100ms"]);
    let mut old = web::begin(&place.gate.address, "PUT", "/a", &[("Fencing-Token", "1")], Some(10)).unwrap();
    old.write_all(b"01234").unwrap();
    until("the old request on its way", || (place.upstream.begun() == 1).then_some(()));
    assert_eq!(place.put("/a", 2, "two").status, 200);
    assert_eq!(place.gate.says("cut_off")["resource"], "/a");
    let _ = old.write_all(b"56789");
    let reply = web::answer(&mut old);
    assert!(reply.as_ref().is_err() || reply.as_ref().is_ok_and(|reply| reply.status == 409), "{reply:?}");
    assert_eq!(place.upstream.value("/a").unwrap(), b"two");
    let whole = place.upstream.seen().iter().filter(|seen| seen.complete).count();
    assert_eq!(whole, 1, "only the newer request arrived as a whole");
}

#[test]
fn bodies_stream_both_ways_and_have_a_limit() {
    let place = Place::new(&["--max-body", "8m"]);
    let body = vec![b'y'; 5 << 20];
    assert_eq!(place.send("PUT", "/a", Some("1"), &body).status, 200);
    assert_eq!(place.upstream.value("/a").unwrap(), body);
    assert_eq!(place.send("GET", "/a", Some("1"), b"").body, body);
    assert_eq!(place.send("GET", "/big/20000000", Some("1"), b"").body.len(), 20_000_000);
    let seen = place.upstream.seen().len();
    assert_eq!(place.send("PUT", "/a", Some("9"), &vec![0; 9 << 20]).status, 413);
    assert_eq!(place.upstream.seen().len(), seen, "the announced length was enough to refuse it");
    assert_eq!(place.put("/a", 2, "two").status, 200, "and its token was not let in");
    // In chunks, without an announced length.
    let mut stream = web::begin(&place.gate.address, "PUT", "/b", &[("Fencing-Token", "1")], None).unwrap();
    let chunk = vec![b'z'; 1 << 20];
    for _ in 0..9 {
        let written = stream
            .write_all(b"100000\r\n")
            .and_then(|()| stream.write_all(&chunk))
            .and_then(|()| stream.write_all(b"\r\n"));
        if written.is_err() {
            break;
        }
    }
    let _ = stream.write_all(b"0\r\n\r\n");
    let reply = web::answer(&mut stream);
    assert!(reply.as_ref().is_err() || reply.as_ref().is_ok_and(|reply| reply.status == 413), "{reply:?}");
    assert_eq!(place.upstream.value("/b"), None, "the upstream never got the end of it");
}

#[test]
fn the_body_is_on_its_way_before_its_end_is_there() {
    let place = Place::new(&[]);
    let mut stream = web::begin(&place.gate.address, "PUT", "/a", &[("Fencing-Token", "1")], Some(6)).unwrap();
    stream.write_all(b"one").unwrap();
    // The rest never comes. What the upstream saw of it tells that it was handed on.
    until("the request on its way", || (place.upstream.begun() == 1).then_some(()));
    drop(stream);
    let seen = until("the broken request at the upstream", || place.upstream.seen().into_iter().next());
    assert!(!seen.complete && seen.length <= 3, "{seen:?}");
}

#[test]
fn headers_of_one_connection_are_not_handed_on() {
    let place = Place::new(&[]);
    let headers = [
        ("Fencing-Token", "7"),
        ("Connection", "x-secret-hop, keep-alive"),
        ("X-Secret-Hop", "1"),
        ("Keep-Alive", "timeout=5"),
        ("Proxy-Authorization", "Basic x"),
        ("TE", "trailers"),
        ("Upgrade", "websocket"),
        ("X-Forwarded-For", "10.0.0.1"),
        ("X-Mine", "yes"),
    ];
    let reply = web::send(&place.gate.address, "PUT", "/a?q=1", &headers, b"x").unwrap();
    assert_eq!(reply.status, 200);
    let seen = place.upstream.seen().remove(0);
    for gone in ["x-secret-hop", "keep-alive", "proxy-authorization", "te", "upgrade"] {
        assert_eq!(seen.header(gone), None, "{gone}");
    }
    assert_eq!(seen.path, "/a?q=1");
    assert_eq!(seen.header("x-mine"), Some("yes"));
    assert_eq!(seen.header("fencing-token"), Some("7"), "the upstream may want it too");
    assert_eq!(seen.header("x-forwarded-for"), Some("10.0.0.1, 127.0.0.1"));
    assert_eq!(seen.header("x-forwarded-host"), Some(place.gate.address.as_str()));
    assert_eq!(seen.header("host"), place.upstream.url().strip_prefix("http://"));
    assert_eq!(reply.header("x-hop"), None);
    assert_eq!(reply.header("x-kept"), Some("yes"));
}

#[test]
fn rules_say_what_needs_a_token_and_for_which_resource() {
    let place = Place::new(&["--protect", "/v1", "--resource", "path:2", "--reads-pass", "--keep-host"]);
    assert_eq!(place.send("PUT", "/free", None, b"x").status, 200);
    assert_eq!(place.send("PUT", "/v1/a/x", None, b"x").status, 428);
    assert_eq!(place.send("PUT", "/free/../v1/a/x", None, b"x").status, 428, "no way around");
    assert_eq!(place.send("PUT", "/%76%31/a/x", None, b"x").status, 428, "no way around");
    assert_eq!(place.send("GET", "/v1/a/x", None, b"").status, 404, "a read passes");
    assert_eq!(place.put("/v1/a/x", 5, "x").status, 200);
    assert_eq!(place.put("/v1/a/y", 4, "y").status, 412, "the same resource");
    assert_eq!(place.put("/v1/b/y", 4, "y").status, 200);
    assert_eq!(place.send("GET", "/v1/a/x", Some("4"), b"").status, 412, "a read that shows a token is checked");
    let host = place.upstream.seen()[0].header("host").map(str::to_owned);
    assert_eq!(host.as_deref(), Some(place.gate.address.as_str()));

    let place = Place::new(&["--resource", "header:X-Resource", "--token-header", "X-Token"]);
    let send = |resource: &str, token: &str| {
        let headers = [("X-Resource", resource), ("X-Token", token)];
        web::send(&place.gate.address, "PUT", "/any", &headers, b"x").unwrap().status
    };
    assert_eq!((send("one", "5"), send("two", "4"), send("one", "4")), (200, 200, 412));
    assert_eq!(place.send("PUT", "/any", None, b"x").status, 428);
    let without = web::send(&place.gate.address, "PUT", "/any", &[("X-Token", "9")], b"x").unwrap();
    assert_eq!(without.status, 400, "which resource?");
}

#[test]
fn an_upstream_that_is_down_or_silent_gets_a_clear_answer() {
    let dir = tempfile::tempdir().unwrap();
    let port = fencelock_testkit::redis::free_port();
    let down = format!("http://127.0.0.1:{port}");
    let gate = Gate::start(&down, dir.path().join("x"), &[]);
    let reply = web::send(&gate.address, "PUT", "/a", &[("Fencing-Token", "1")], b"x").unwrap();
    assert_eq!(reply.status, 502);
    assert!(reply.text().contains(&down) && reply.text().contains("is it running?"), "{}", reply.text());
    gate.says("trouble");

    let place = Place::new(&["--timeout", "200ms"]);
    place.upstream.hold("/a");
    let reply = place.put("/a", 1, "x");
    assert_eq!(reply.status, 504);
    assert!(reply.text().contains("did not answer within 200ms"), "{}", reply.text());
    let mut stalled = web::begin(&place.gate.address, "PUT", "/b", &[("Fencing-Token", "1")], Some(5)).unwrap();
    stalled.write_all(b"x").unwrap();
    assert_eq!(web::answer(&mut stalled).unwrap().status, 408);
}

#[test]
fn the_gate_ends_when_requests_have_come_to_their_end() {
    let mut place = Place::new(&[]);
    place.upstream.hold("/a");
    let address = place.gate.address.clone();
    let under_way =
        std::thread::spawn(move || web::send(&address, "PUT", "/a", &[("Fencing-Token", "1")], b"x").unwrap());
    until("the request at the upstream", || (place.upstream.seen().len() == 1).then_some(()));
    place.gate.signal(Signal::TERM);
    place.gate.says("ending");
    assert!(place.gate.ended().is_none());
    until("no new connection", || std::net::TcpStream::connect(&place.gate.address).is_err().then_some(()));
    place.upstream.let_go("/a");
    assert_eq!(under_way.join().unwrap().status, 200);
    let status = until("the gate's end", || place.gate.ended());
    assert!(status.success(), "{status}");
}

#[test]
fn what_is_said_holds_no_secret() {
    let place = Place::new(&["-v"]);
    let headers = [("Fencing-Token", "1"), ("Authorization", "Bearer hush-hush")];
    web::send(&place.gate.address, "PUT", "/a?signature=hush-hush", &headers, b"hush-hush").unwrap();
    let told = place.gate.says("passed").to_string();
    assert!(told.contains("/a") && !told.contains("hush"), "{told}");
}

#[test]
fn bad_input_is_refused_in_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    let store = store.to_str().unwrap();
    let good = ["--listen", "127.0.0.1:0", "--upstream", "http://127.0.0.1:1", "--store", store];
    let with = |changes: &[&'static str]| -> Vec<String> {
        let mut words: Vec<String> = good.iter().map(|&word| word.to_owned()).collect();
        for pair in changes.chunks(2) {
            match words.iter().position(|word| word == pair[0]) {
                Some(at) => words[at + 1] = pair[1].to_owned(),
                None => words.extend(pair.iter().map(|&word| word.to_owned())),
            }
        }
        words
    };
    let table: &[(&[&str], &str)] = &[
        (&["--listen", "nowhere"], "127.0.0.1:8080"),
        (&["--upstream", "localhost"], "http://host:port"),
        (&["--upstream", "http://me:pass-word@host"], "a password"),
        (&["--resource", "everything"], "path:2"),
        (&["--protect", "v1"], "slash"),
        (&["--max-body", "lots"], "64k"),
        (&["--drain", "soon"], "--drain"),
        (&["--token-header", "a b"], "--token-header"),
    ];
    for (changes, expected) in table {
        let output = Command::new(env!("CARGO_BIN_EXE_fencelock")).arg("gate").args(with(changes)).output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(64), "{changes:?}: {told}");
        assert_eq!(told.lines().count(), 1, "{changes:?}: {told}");
        assert!(told.contains(expected) && !told.contains("pass-word"), "{changes:?}: {told}");
    }
    assert!(!dir.path().join("store").exists(), "nothing was touched");
    let place = Place::new(&[]);
    let output = Command::new(env!("CARGO_BIN_EXE_fencelock"))
        .args(["gate", "--listen", "127.0.0.1:0", "--upstream", "http://127.0.0.1:1", "--store"])
        .arg(place.store())
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(69), "{told}");
    assert!(told.contains("in use by another gate"), "{told}");
}

#[test]
fn nonsense_on_the_wire_does_no_harm() {
    let place = Place::new(&[]);
    for nonsense in [
        &b"\x16\x03\x01\x02\x00\x01\x00"[..],
        b"GET\r\n\r\n",
        b"PUT /a HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"\0\0\0\0\r\n\r\n",
    ] {
        let mut stream = std::net::TcpStream::connect(&place.gate.address).unwrap();
        stream.set_read_timeout(Some(harness::DEADLINE)).unwrap();
        stream.write_all(nonsense).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let _ = stream.read_to_end(&mut Vec::new());
    }
    // Two lengths at once are the way to smuggle a second request past a proxy.
    let smuggled = [("Fencing-Token", "1"), ("Transfer-Encoding", "chunked")];
    let reply = web::send(&place.gate.address, "PUT", "/a", &smuggled, b"0\r\n\r\nPUT /a HTTP/1.1\r\n\r\n");
    assert!(reply.is_err() || reply.is_ok_and(|reply| reply.status >= 400 || reply.status == 200));
    assert!(place.upstream.seen().len() <= 1, "{:?}", place.upstream.seen());
    assert_eq!(place.put("/a", 2, "fine").status, 200, "it goes on");
}
