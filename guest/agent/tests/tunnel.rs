//! `CONNECT`: streams to TCP ports of the guest's loopback.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod agent;

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use agent::{Agent, PATIENCE, by_pid, init, refusal, sh, until};
use envd::{Blob, Empty, ProcessInput, SendInputRequest, Tunnel};

/// Serves the connections of a port, each by `serve` on a new thread. Returns the port.
fn port(listener: TcpListener, serve: fn(TcpStream)) -> u16 {
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            thread::spawn(move || serve(stream));
        }
    });
    port
}

fn echo(mut stream: TcpStream) {
    let mut reader = stream.try_clone().unwrap();
    std::io::copy(&mut reader, &mut stream).ok();
    stream.shutdown(Shutdown::Write).ok();
}

fn open(agent: &Agent, port: u16) -> Tunnel {
    let tunnel = agent.client().tunnel(port).unwrap();
    tunnel.stream.set_read_timeout(Some(PATIENCE)).unwrap();
    tunnel.stream.set_write_timeout(Some(PATIENCE)).unwrap();
    tunnel
}

fn read_to_end(tunnel: &mut Tunnel) -> Vec<u8> {
    let mut bytes = std::mem::take(&mut tunnel.early);
    tunnel.stream.read_to_end(&mut bytes).unwrap();
    bytes
}

#[test]
fn bytes_and_closes_pass_both_ways() {
    let agent = Agent::start();
    let port = port(TcpListener::bind("127.0.0.1:0").unwrap(), echo);
    let mut tunnel = open(&agent, port);
    for word in ["hello", "again"] {
        tunnel.stream.write_all(word.as_bytes()).unwrap();
        let mut back = [0; 5];
        tunnel.stream.read_exact(&mut back).unwrap();
        assert_eq!(back, word.as_bytes());
    }
    let bytes: Vec<u8> = (0..20_u32 << 20)
        .map(|i| u8::try_from(i % 251).unwrap())
        .collect();
    let mut writer = tunnel.stream.try_clone().unwrap();
    let sent = bytes.clone();
    let writing = thread::spawn(move || {
        writer.write_all(&sent).unwrap();
        // The port continues to send after the client has closed.
        writer.shutdown(Shutdown::Write).unwrap();
    });
    let back = read_to_end(&mut tunnel);
    writing.join().unwrap();
    assert!(back == bytes, "{} bytes of {}", back.len(), bytes.len());
    assert!(agent.peak_kib() < 16 << 10, "{} KiB", agent.peak_kib());
}

#[test]
fn a_port_that_closes_first_still_receives() {
    let agent = Agent::start();
    static HEARD: AtomicUsize = AtomicUsize::new(0);
    let port = port(TcpListener::bind("127.0.0.1:0").unwrap(), |mut stream| {
        stream.write_all(b"bye").unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).unwrap();
        HEARD.store(rest.len(), Ordering::SeqCst);
    });
    let mut tunnel = open(&agent, port);
    assert_eq!(read_to_end(&mut tunnel), b"bye");
    tunnel.stream.write_all(&[b'x'; 1000]).unwrap();
    tunnel.stream.shutdown(Shutdown::Write).unwrap();
    until("the rest", || {
        (HEARD.load(Ordering::SeqCst) == 1000).then_some(())
    });
}

#[test]
fn bytes_sent_before_the_answer_arrive() {
    let agent = Agent::start();
    let port = port(TcpListener::bind("127.0.0.1:0").unwrap(), echo);
    let mut stream = std::os::unix::net::UnixStream::connect(&agent.socket).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let request = format!("CONNECT localhost:{port} HTTP/1.1\r\nhost: localhost\r\n\r\nearly");
    stream.write_all(request.as_bytes()).unwrap();
    let expected = b"HTTP/1.1 200 Connection established\r\n\r\nearly";
    let mut answer = vec![0; expected.len()];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(answer, expected);
}

#[test]
fn a_port_that_listens_on_ipv6_only_is_found() {
    let Ok(listener) = TcpListener::bind("[::1]:0") else {
        println!("skipped: needs IPv6 on loopback");
        return;
    };
    let agent = Agent::start();
    let port = port(listener, echo);
    let mut tunnel = open(&agent, port);
    tunnel.stream.write_all(b"six").unwrap();
    tunnel.stream.shutdown(Shutdown::Write).unwrap();
    assert_eq!(read_to_end(&mut tunnel), b"six");
}

#[test]
fn closed_ports_and_other_hosts_are_refused() {
    let agent = Agent::start();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let closed = listener.local_addr().unwrap().port();
    drop(listener);
    let refused = agent.client().tunnel(closed).unwrap_err();
    let (status, code, message) = refusal(refused);
    assert_eq!((status, code.as_str()), (502, "502"));
    assert_eq!(message, "The sandbox is running but port is not open");
    let cases = [
        (403, "example.org:80"),
        (403, "169.254.169.254:80"),
        (400, "localhost"),
        (400, "localhost:0"),
        (405, "/health"),
    ];
    for (status, target) in cases {
        // Bytes after a refused CONNECT were meant for the port.
        let request = format!("CONNECT {target} HTTP/1.1\r\n\r\nGET /health HTTP/1.1\r\n\r\n");
        let mut client = agent.client();
        let answer = client.raw(request.as_bytes()).unwrap();
        assert_eq!(answer.status, status, "{target}");
        assert!(answer.body.starts_with(b"{\"code\":"), "{target}");
        if status != 405 {
            assert_eq!(answer.header("connection"), Some("close"), "{target}");
        }
    }
}

#[test]
fn a_tunnel_needs_an_identity_and_no_token() {
    let agent = Agent::raw();
    let port = port(TcpListener::bind("127.0.0.1:0").unwrap(), echo);
    let early = agent.client().tunnel(port).unwrap_err();
    assert_eq!(refusal(early).0, 503);
    let mut settings = init();
    settings.access_token = Some("secret".into());
    agent.client().init(&settings).unwrap();
    let mut tunnel = open(&agent, port);
    tunnel.stream.write_all(b"x").unwrap();
    let mut back = [0];
    tunnel.stream.read_exact(&mut back).unwrap();
}

#[test]
fn a_client_that_disconnects_frees_the_port() {
    let agent = Agent::start();
    static ENDED: AtomicUsize = AtomicUsize::new(0);
    // Sends nothing and reads to the end.
    let port = port(TcpListener::bind("127.0.0.1:0").unwrap(), |mut stream| {
        let mut one = [0];
        while stream.read(&mut one).is_ok_and(|n| n > 0) {}
        // Reads the end, then sends until that fails.
        while stream.write_all(&[0; 1024]).is_ok() {}
        ENDED.fetch_add(1, Ordering::SeqCst);
    });
    let tunnel = open(&agent, port);
    drop(tunnel);
    until("the end", || {
        (ENDED.load(Ordering::SeqCst) == 1).then_some(())
    });
}

#[test]
fn a_silent_port_does_not_keep_a_dead_client() {
    let agent = Agent::start();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    // The listener, and two for each tunnel.
    let sockets = |wanted: usize| {
        let fds = std::fs::read_dir(format!("/proc/{}/fd", agent.child.id())).unwrap();
        let targets = fds.filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok());
        let sockets = targets.filter(|to| to.to_string_lossy().starts_with("socket:"));
        (sockets.count() == wanted).then_some(())
    };
    until("quiet", || sockets(1));
    let tunnel = open(&agent, port);
    let (_silent, _) = listener.accept().unwrap();
    assert_eq!(sockets(3), Some(()));
    // First close only the sending side: the port could still respond.
    tunnel.stream.shutdown(Shutdown::Write).unwrap();
    agent.client().health().unwrap();
    until("the others' end", || sockets(3));
    drop(tunnel);
    until("the end", || sockets(1));
}

#[test]
fn a_slow_client_blocks_the_port_instead_of_filling_memory() {
    let agent = Agent::start();
    static WRITTEN: AtomicUsize = AtomicUsize::new(0);
    let port = port(TcpListener::bind("127.0.0.1:0").unwrap(), |mut stream| {
        for _ in 0..1024 {
            if stream.write_all(&[7; 64 << 10]).is_err() {
                return;
            }
            WRITTEN.fetch_add(64 << 10, Ordering::SeqCst);
        }
    });
    let mut tunnel = open(&agent, port);
    // It blocks once the kernel's buffers are full.
    let (mut last, mut same) = (0, 0);
    until("the stop", || {
        let now = WRITTEN.load(Ordering::SeqCst);
        same = if now == last && now > 0 { same + 1 } else { 0 };
        last = now;
        (same > 100).then_some(())
    });
    assert!(last < 64 << 20, "all of it went somewhere");
    agent.client().health().unwrap();
    let bytes = read_to_end(&mut tunnel);
    assert_eq!(bytes.len(), 64 << 20);
    assert!(agent.peak_kib() < 16 << 10, "{} KiB", agent.peak_kib());
}

#[test]
fn many_tunnels_and_streams_work_at_once() {
    let agent = Agent::start();
    let port = port(TcpListener::bind("127.0.0.1:0").unwrap(), echo);
    let mut tunnels: Vec<Tunnel> = (0..200).map(|_| open(&agent, port)).collect();
    let mut clients: Vec<_> = (0..200).map(|_| agent.client()).collect();
    let mut waiting = sh("read x; echo $x");
    waiting.stdin = Some(true);
    let mut streams: Vec<_> = clients
        .iter_mut()
        .map(|client| client.start(&waiting, PATIENCE * 3).unwrap())
        .collect();
    // Idle connections come and go in the meantime; none of the above is closed to make room.
    let idle: Vec<_> = (0..900).filter_map(|_| agent.try_client()).collect();
    for (n, tunnel) in (0_u32..).zip(&mut tunnels) {
        tunnel.stream.write_all(&n.to_be_bytes()).unwrap();
    }
    for (n, tunnel) in (0_u32..).zip(&mut tunnels) {
        let mut back = [0; 4];
        tunnel.stream.read_exact(&mut back).unwrap();
        assert_eq!(back, n.to_be_bytes());
    }
    drop(idle);
    let mut other = agent.client();
    for stream in &mut streams {
        let input = SendInputRequest {
            process: by_pid(stream.pid()),
            input: ProcessInput {
                stdin: Some(Blob(b"word\n".to_vec())),
                pty: None,
            },
        };
        let _: Empty = other.call("process.Process/SendInput", &input).unwrap();
        let data = stream.next_event().unwrap().unwrap().data;
        assert_eq!(data.unwrap().stdout.unwrap().0, b"word\n");
    }
    assert!(agent.peak_kib() < 64 << 10, "{} KiB", agent.peak_kib());
}
