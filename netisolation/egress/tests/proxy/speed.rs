//! Measurements for results/notes-use.md: `cargo test --release -p egress --test proxy speed -- --ignored --nocapture
//! --test-threads 1`.

use std::{net::SocketAddr, sync::Arc, time::Instant};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::{
    client::{config, connect, get, http1, send1, tls},
    origin::{self, Origin},
    world::{Ca, SECRET, World},
};

/// Nearest rank.
fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len().div_ceil(2) - 1]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures; run alone, in release"]
async fn speed_of_a_warm_terminated_connection() {
    const ROUNDS: usize = 20;
    const REQUESTS: usize = 200;
    let servers = Arc::new(Ca::new("servers"));
    let origin = Origin::tls(&servers, &["api.test"], &["http/1.1"]).await;
    let world = World::new(
        &servers,
        origin.address.port(),
        &["--sandbox-requests", "1000000"],
    );
    let guest = world.guest(origin.address, &["api.test"]);
    world.rule("api.test", SECRET);
    let mut through = http1(tls(&world, guest, "api.test", &["http/1.1"]).await.unwrap()).await;
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config(&world, &["http/1.1"])));
    let stream = TcpStream::connect(origin.address).await.unwrap();
    stream.set_nodelay(true).unwrap();
    let mut direct = http1(
        connector
            .connect("api.test".try_into().unwrap(), stream)
            .await
            .unwrap(),
    )
    .await;
    let (mut slow, mut fast) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        for (sender, samples) in [(&mut through, &mut slow), (&mut direct, &mut fast)] {
            for _ in 0..REQUESTS {
                let began = Instant::now();
                assert_eq!(send1(sender, get("api.test", "/")).await.text, "ok");
                samples.push(began.elapsed().as_secs_f64() * 1e3);
            }
        }
    }
    let n = slow.len();
    let (slow, fast) = (median(slow), median(fast));
    println!(
        "terminated request: P50 {slow:.3} ms, direct {fast:.3} ms, added {:.3} ms (n = {n} each)",
        slow - fast
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures; run alone, in release"]
async fn speed_of_an_unread_connection() {
    const LENGTH: usize = 256 << 20;
    let servers = Arc::new(Ca::new("servers"));
    let address = origin::raw(|mut stream: TcpStream| async move {
        let mut request = [0; 1];
        while stream.read_exact(&mut request).await.is_ok() {
            let length = if request[0] == b'b' { LENGTH } else { 64 };
            let part = vec![0; 64 << 10];
            let mut left = length;
            while left > 0 {
                let now = left.min(part.len());
                if stream.write_all(&part[..now]).await.is_err() {
                    return;
                }
                left -= now;
            }
        }
    })
    .await;
    let world = World::new(&servers, 1, &[]);
    let guest = world.guest_by_address(address, &[]);
    let mut ratios = Vec::new();
    let (mut slow, mut fast) = (Vec::new(), Vec::new());
    for _ in 0..9 {
        let mut times = Vec::new();
        for target in [Some(guest), None] {
            let mut stream = open(&world, target, address).await;
            times.push(transfer(&mut stream, b'b', LENGTH).await);
            let samples = if target.is_some() {
                &mut slow
            } else {
                &mut fast
            };
            for _ in 0..500 {
                samples.push(transfer(&mut stream, b's', 64).await * 1e3);
            }
        }
        ratios.push(times[1] / times[0]);
        println!(
            "256 MiB unread: {:.0} MB/s, direct {:.0} MB/s",
            268.4 / times[0],
            268.4 / times[1]
        );
    }
    let (slow, fast) = (median(slow), median(fast));
    println!(
        "throughput unread / direct: {:.2} (median of 9)",
        median(ratios)
    );
    println!(
        "64 bytes unread: P50 {slow:.3} ms, direct {fast:.3} ms: {:.2} times",
        slow / fast
    );
}

async fn open(world: &World, guest: Option<std::net::Ipv4Addr>, address: SocketAddr) -> TcpStream {
    let stream = match guest {
        Some(guest) => connect(world, guest).await,
        None => TcpStream::connect(address).await.unwrap(),
    };
    stream.set_nodelay(true).unwrap();
    stream
}

/// Seconds.
async fn transfer(stream: &mut TcpStream, kind: u8, length: usize) -> f64 {
    let began = Instant::now();
    stream.write_all(&[kind]).await.unwrap();
    let mut buffer = vec![0; 256 << 10];
    let mut left = length;
    while left > 0 {
        let now = left.min(buffer.len());
        left -= stream.read(&mut buffer[..now]).await.unwrap();
    }
    began.elapsed().as_secs_f64()
}

/// Half of the connections are read, half are not. Each has completed an exchange.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures; run alone, in release"]
async fn speed_memory_of_a_thousand_connections() {
    const CONNECTIONS: usize = 1000;
    let servers = Arc::new(Ca::new("servers"));
    let origin = Origin::tls(&servers, &["api.test", "free.test"], &["http/1.1"]).await;
    let options = [
        "--sandbox-requests",
        "1000000",
        "--sandbox-connections",
        "1000",
    ];
    let world = World::new(&servers, origin.address.port(), &options);
    let guest = world.guest(origin.address, &["api.test", "free.test"]);
    world.rule("api.test", SECRET);
    let before = world.peak_memory();
    let mut held = Vec::new();
    let began = Instant::now();
    for index in 0..CONNECTIONS {
        let name = if index % 2 == 0 {
            "api.test"
        } else {
            "free.test"
        };
        let mut sender = http1(tls(&world, guest, name, &["http/1.1"]).await.unwrap()).await;
        let request = get(name, "/bytes/100000");
        assert_eq!(send1(&mut sender, request).await.text.len(), 100_000);
        held.push(sender);
    }
    let memory = world.peak_memory();
    println!(
        "{CONNECTIONS} connections in {:.1} s: at most {} MiB resident, {} MiB at the start",
        began.elapsed().as_secs_f64(),
        memory >> 20,
        before >> 20
    );
    assert!(memory < 200 << 20, "{memory} bytes");
}
