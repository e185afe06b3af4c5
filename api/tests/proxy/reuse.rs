//! Requests that meet a connection to the agent which has just ended.

use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream as StdStream;
use std::sync::{Arc, Mutex};

use tokio::io::BufReader;
use tokio::net::UnixStream;

use crate::wire::{Reply, Wire};
use crate::world::{Agent, Setup, World, until};

const ENVD: u16 = 49_983;
const START: &str = "/process.Process/Start";
const LIST: &str = "/process.Process/List";

/// A guest that answers each request with the request's body.
#[derive(Clone, Default)]
struct Echo {
    /// The first line of each request that was read to its end.
    seen: Arc<Mutex<Vec<String>>>,
    latest: Arc<Mutex<Option<StdStream>>>,
    fault: Arc<Mutex<Option<Fault>>>,
}

/// How the guest treats a request that it does not answer.
#[derive(Clone, Copy)]
enum Fault {
    Close,
    Garble,
}

impl Echo {
    async fn serve(self, client: BufReader<UnixStream>) {
        let socket = client.get_ref().as_fd().try_clone_to_owned().unwrap();
        *self.latest.lock().unwrap() = Some(socket.into());
        let mut wire = Wire::over(client);
        wire.send("OK 1\n").await;
        while let Some(body) = self.request(&mut wire).await {
            let fault = self.fault.lock().unwrap().take();
            match fault {
                None => {}
                Some(Fault::Close) => return self.close(Shutdown::Both),
                Some(Fault::Garble) => return wire.send("garbage\r\n\r\n").await,
            }
            let length = body.len();
            wire.send(format!(
                "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n"
            ))
            .await;
            wire.send(body).await;
        }
    }

    /// Reads a request and returns its body.
    async fn request(&self, wire: &mut Wire<BufReader<UnixStream>>) -> Option<Vec<u8>> {
        let head = String::from_utf8(wire.until_blank_line().await).unwrap();
        let (first, fields) = head.split_once("\r\n")?;
        let length = fields
            .lines()
            .find_map(|line| line.strip_prefix("Content-Length: "));
        let mut body = Vec::new();
        if let Some(length) = length {
            body = wire.exactly(length.parse().unwrap()).await?;
        } else if fields.contains("chunked") {
            while let chunk = wire.chunk().await?
                && !chunk.is_empty()
            {
                body.extend(chunk);
            }
            wire.line().await;
        }
        self.seen.lock().unwrap().push(first.to_owned());
        Some(body)
    }

    fn close(&self, how: Shutdown) {
        let latest = self.latest.lock().unwrap();
        latest.as_ref().unwrap().shutdown(how).unwrap();
    }

    fn count(&self, path: &str) -> usize {
        let seen = self.seen.lock().unwrap();
        seen.iter().filter(|line| line.contains(path)).count()
    }
}

/// A server and a client whose connection to the guest is idle.
async fn idle() -> (World, Echo, Wire) {
    let echo = Echo::default();
    let guest = echo.clone();
    let world = World::with_guest(Setup::default(), move |client| guest.clone().serve(client));
    let world = world.await;
    let mut wire = Wire::connect(world.address).await;
    let reply = wire.ask("GET /health", &world.to(ENVD)).await;
    assert_eq!(reply.status, 200);
    (world, echo, wire)
}

/// Posts a body over a connection to the guest that ends after the request's route was found. On this runtime with one
/// thread, no task runs between that and the choice of the connection, so that the proxy cannot have noticed the end.
async fn post_at_the_end(how: Shutdown, body: &[u8]) -> (Reply, Echo) {
    let (world, echo, mut wire) = idle().await;
    let closing = echo.clone();
    world.table.on_next_route(move || closing.close(how));
    let reply = wire.post(START, &world.to(ENVD), body).await;
    (reply, echo)
}

#[tokio::test]
async fn a_request_that_meets_an_unnoticed_end_is_sent_on_another_connection() {
    for how in [Shutdown::Write, Shutdown::Both] {
        for length in [0, 5, 300_000] {
            let body: Vec<u8> = (0..=250).cycle().take(length).collect();
            let (reply, echo) = post_at_the_end(how, &body).await;
            assert_eq!(reply.status, 200, "{how:?} {length}: {}", reply.text());
            assert!(reply.body == body, "{how:?} {length}");
            assert_eq!(echo.count(START), 1);
        }
    }
}

/// The part of a body that the lost connection took is sent again, and the rest follows as it arrives.
#[tokio::test]
async fn a_body_in_parts_is_whole_on_another_connection() {
    let (world, echo, mut wire) = idle().await;
    let closing = echo.clone();
    world
        .table
        .on_next_route(move || closing.close(Shutdown::Both));
    let fields = format!("{}Transfer-Encoding: chunked\r\n", world.to(ENVD));
    let head = format!("POST {START} HTTP/1.1\r\n{fields}\r\n");
    wire.send(format!("{head}5\r\nfirst\r\n")).await;
    until("another connection", || world.table.asked() > 1).await;
    wire.send("7\r\n second\r\n0\r\n\r\n").await;
    let reply = wire.answer(false).await;
    assert_eq!((reply.status, reply.text()), (200, "first second"));
}

#[tokio::test]
async fn a_request_that_the_guest_may_have_seen_is_sent_again_only_if_it_reads() {
    for (line, again) in [
        (format!("GET {START}"), true),
        (format!("POST {LIST}"), true),
        (format!("POST {START}"), false),
        (format!("PUT {LIST}"), false),
        (format!("POST {LIST}/"), false),
    ] {
        let (world, echo, mut wire) = idle().await;
        *echo.fault.lock().unwrap() = Some(Fault::Close);
        let fields = format!("{}Content-Length: 4\r\n\r\nbody", world.to(ENVD));
        wire.send(format!("{line} HTTP/1.1\r\n{fields}")).await;
        let reply = wire.answer(false).await;
        assert_eq!(reply.status, if again { 200 } else { 502 }, "{line}");
        assert_eq!(echo.count(&line), if again { 2 } else { 1 }, "{line}");
        assert!(!again || reply.text() == "body", "{line}");
    }
}

#[tokio::test]
async fn a_request_whose_answer_is_not_http_is_not_sent_again() {
    let (world, echo, mut wire) = idle().await;
    *echo.fault.lock().unwrap() = Some(Fault::Garble);
    let reply = wire.ask("GET /files", &world.to(ENVD)).await;
    assert_eq!(reply.status, 502);
    assert_eq!(echo.count("/files"), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_idle_connection_does_not_fail_a_request() {
    let mut world = World::new().await;
    let mut wire = Wire::connect(world.address).await;
    for round in 0..5 {
        assert_eq!(
            wire.ask("GET /envs", &world.to(ENVD)).await.status,
            200,
            "{round}"
        );
        world.agent = None;
        let dir = world.dir.path().to_owned();
        let again = tokio::task::spawn_blocking(move || Agent::start(&dir));
        world.agent = Some(again.await.unwrap());
    }
    let list = "Content-Type: application/json\r\n";
    let fields = format!("{}{list}", world.to(ENVD));
    let reply = wire.post("/process.Process/List", &fields, b"{}").await;
    assert_eq!(reply.status, 200);
}
