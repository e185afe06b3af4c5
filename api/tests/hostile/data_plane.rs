//! Response bodies of several gigabytes pass through the server: back-pressure reaches the sandbox, and the server's
//! buffers are small.

use std::{
    io::{Read, Write},
    net::TcpStream,
    time::Duration,
};

use serde_json::json;

use crate::server::{MIB, PATIENCE, Server};

/// Streams per sandbox. The stand-in needs a thread for each, and its number of threads is limited.
const STREAMS: usize = 40;
const SANDBOXES: usize = 6;
/// Maximum memory of the server for one stream that the client does not read.
const HELD_MAX: u64 = 300 << 10;

/// Requests an endless body from a sandbox and reads the head of the response.
fn ask(server: &Server, id: &str) -> TcpStream {
    let mut stream = TcpStream::connect(server.address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let address = server.address;
    let request = format!(
        "GET /files?path=x HTTP/1.1\r\nHost: {address}\r\nE2b-Sandbox-Id: {id}\r\nE2b-Sandbox-Port: 49983\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).unwrap();
    let mut start = [0; 15];
    stream.read_exact(&mut start).unwrap();
    assert_eq!(&start, b"HTTP/1.1 200 OK");
    stream
}

#[test]
fn bodies_that_are_not_read_stay_in_the_guest() {
    let server = Server::start(&[], &["--warm", "0:0"]);
    let ids: Vec<_> = (0..SANDBOXES)
        .map(|_| server.create("good", &json!({})))
        .collect();
    let before = server.forget_peak();
    let each_many = ids.iter().flat_map(|id| std::iter::repeat_n(id, STREAMS));
    let streams: Vec<_> = each_many.map(|id| ask(&server, id)).collect();
    // Wait until no stream makes progress.
    let mut last = 0;
    crate::server::until("the streams stand still", || {
        std::thread::sleep(Duration::from_millis(200));
        std::mem::replace(&mut last, server.peak_bytes()) == last
    });
    let held = server.peak_bytes().saturating_sub(before) / u64::try_from(streams.len()).unwrap();
    assert!(held < HELD_MAX, "the server holds {held} bytes per stream");
    // Another sandbox is still served.
    let other = server.create("good", &json!({}));
    assert_eq!(server.knock(&other, 49_983).status, 204);
    drop(streams);
}

#[test]
fn a_body_of_gigabytes_needs_little_memory() {
    const READ: u64 = 512 * MIB;
    let server = Server::start(&[], &["--warm", "0:0"]);
    let id = server.create("good", &json!({}));
    let before = server.forget_peak();
    let passed = std::io::copy(&mut ask(&server, &id).take(READ), &mut std::io::sink()).unwrap();
    assert_eq!(passed, READ);
    let grown = server.peak_bytes().saturating_sub(before);
    assert!(grown < 16 * MIB, "grown by {} MiB", grown / MIB);
}
