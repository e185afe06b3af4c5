//! Prints the cost of the proxy, without limits: `cargo test --release -p api --test proxy -- --ignored --nocapture
//! measure`. The agent runs on the host, so the figures include neither vsock nor a guest; "direct" is the same
//! exchange on the agent's own socket.

use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};

use crate::guest::Program;
use crate::wire::Wire;
use crate::world::World;

const ENVD: u16 = 49_983;
const SIZE: usize = 100 << 20;
const ROUNDS: usize = 5;
const REQUESTS: usize = 2000;

/// Throughput in MB/s of a transfer of [`SIZE`] bytes.
fn rate(took: Duration) -> f64 {
    let bytes = f64::from(u32::try_from(SIZE).unwrap());
    bytes / took.as_secs_f64() / 1e6
}

async fn download<S: AsyncRead + AsyncWrite + Unpin>(stream: S, to: &str, path: &str) -> Duration {
    let mut wire = Wire::over(stream);
    let begun = Instant::now();
    wire.send(format!("GET /files?path={path} HTTP/1.1\r\n{to}\r\n"))
        .await;
    assert_eq!(wire.head().await.status, 200);
    let mut left = SIZE - wire.take_unread();
    let mut buffer = vec![0; 1 << 20];
    while left > 0 {
        let read = wire.stream.read(&mut buffer).await.unwrap();
        assert!(read > 0);
        left -= read;
    }
    begun.elapsed()
}

async fn upload<S: AsyncRead + AsyncWrite + Unpin>(stream: S, to: &str, path: &str) -> Duration {
    let mut wire = Wire::over(stream);
    let piece = vec![b'x'; 1 << 20];
    let kind = "Content-Type: application/octet-stream\r\n";
    let begun = Instant::now();
    wire.send(format!(
        "POST /files?path={path} HTTP/1.1\r\n{to}{kind}Content-Length: {SIZE}\r\n\r\n"
    ))
    .await;
    for _ in 0..SIZE >> 20 {
        wire.stream.write_all(&piece).await.unwrap();
    }
    assert_eq!(wire.answer(false).await.status, 200);
    begun.elapsed()
}

async fn latency<S: AsyncRead + AsyncWrite + Unpin>(stream: S, to: &str) -> [Duration; 2] {
    let mut wire = Wire::over(stream);
    let mut samples = Vec::with_capacity(REQUESTS);
    for _ in 0..REQUESTS {
        let begun = Instant::now();
        let reply = wire.ask("GET /health", to).await;
        samples.push(begun.elapsed());
        assert!(matches!(reply.status, 200 | 204));
    }
    samples.sort_unstable();
    [50, 95].map(|percent| samples[REQUESTS * percent / 100])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "prints figures without checking them"]
async fn measure() {
    let world = World::new().await;
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = dir.path().join("file").display().to_string();
    let agent = world.agent.as_ref().unwrap().socket.clone();
    let direct = async || UnixStream::connect(&agent).await.unwrap();
    let proxied = async || TcpStream::connect(world.address).await.unwrap();
    let vsock = async || {
        let path = world.dir.path().join("vsock.sock");
        let mut stream = UnixStream::connect(path).await.unwrap();
        stream.write_all(b"CONNECT 49983\n").await.unwrap();
        let mut greeting = [0; 14];
        stream.read_exact(&mut greeting).await.unwrap();
        stream
    };
    let to = world.to(ENVD);
    for _ in 0..ROUNDS {
        let figures = [
            upload(direct().await, "Host: x\r\n", &path).await,
            upload(vsock().await, "Host: x\r\n", &path).await,
            upload(proxied().await, &to, &path).await,
            download(direct().await, "Host: x\r\n", &path).await,
            download(vsock().await, "Host: x\r\n", &path).await,
            download(proxied().await, &to, &path).await,
        ];
        let [a, b, c, d, e, f] = figures.map(rate);
        println!(
            "MB/s: up {a:.0} direct, {b:.0} test's vsock, {c:.0} proxied; down {d:.0}, {e:.0}, {f:.0}"
        );
    }
    let mirror = Program::mirror().await;
    for _ in 0..ROUNDS {
        let [a, b] = latency(direct().await, "Host: x\r\n").await;
        let [c, d] = latency(vsock().await, "Host: x\r\n").await;
        let [e, f] = latency(proxied().await, &to).await;
        let [g, h] = latency(proxied().await, &world.to(mirror.port)).await;
        println!(
            "P50/P95: {a:?}/{b:?} direct, {c:?}/{d:?} test's vsock, {e:?}/{f:?} proxied, {g:?}/{h:?} tunnelled"
        );
    }
}
