//! Connections through the SOCKS5 proxy of a sandbox.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use egress::control::{Credentials, Way, WayTls};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, copy_bidirectional},
    net::TcpStream,
};

use crate::{
    client::{get, http1, send1, tls},
    origin::{self, Origin},
    world::{Ca, SECRET, World},
};

const USER: &str = "me";
const PASSWORD: &str = "a-password-of-the-proxy";

/// A SOCKS5 proxy that requires credentials. Returns its address, and the requested addresses.
async fn socks() -> (SocketAddr, Arc<Mutex<Vec<SocketAddr>>>) {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&asked);
    let address = origin::raw(move |stream: TcpStream| {
        let kept = Arc::clone(&kept);
        async move {
            // If a client disconnects early, the test detects it.
            let _ = serve(stream, &kept).await;
        }
    });
    (address.await, asked)
}

/// The same in TLS, with a certificate for this name.
async fn socks_in_tls(ca: &Ca, name: &str) -> (SocketAddr, Arc<Mutex<Vec<SocketAddr>>>) {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let (kept, acceptor) = (Arc::clone(&asked), origin::acceptor(ca, &[name], &[]));
    let address = origin::raw(move |stream: TcpStream| {
        let (kept, acceptor) = (Arc::clone(&kept), acceptor.clone());
        async move {
            if let Ok(stream) = acceptor.accept(stream).await {
                let _ = serve(stream, &kept).await;
            }
        }
    });
    (address.await, asked)
}

async fn serve(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    asked: &Mutex<Vec<SocketAddr>>,
) -> std::io::Result<()> {
    let mut hello = [0; 3];
    stream.read_exact(&mut hello).await?;
    assert_eq!(hello, [5, 1, 2]);
    stream.write_all(&[5, 2]).await?;
    stream.flush().await?;
    let mut login = vec![0; 3 + USER.len() + PASSWORD.len()];
    stream.read_exact(&mut login).await?;
    let is_right = login[2..].starts_with(USER.as_bytes()) && login.ends_with(PASSWORD.as_bytes());
    stream.write_all(&[1, u8::from(!is_right)]).await?;
    stream.flush().await?;
    let mut request = [0; 10];
    stream.read_exact(&mut request).await?;
    let address: [u8; 4] = request[4..8].try_into().unwrap();
    let port = u16::from_be_bytes([request[8], request[9]]);
    let remote = SocketAddr::from((address, port));
    asked.lock().unwrap().push(remote);
    let mut server = TcpStream::connect(remote).await?;
    stream.write_all(&[5, 0, 0, 1, 0, 0, 0, 0, 0, 0]).await?;
    stream.flush().await?;
    copy_bidirectional(&mut stream, &mut server).await?;
    Ok(())
}

fn by(address: SocketAddr, password: &str) -> Way {
    Way::Socks {
        addresses: vec![address],
        credentials: Some(Credentials {
            user: USER.to_owned(),
            password: password.to_owned(),
        }),
        tls: None,
    }
}

fn in_tls(address: SocketAddr, name: &str, ca: Option<&Ca>) -> Way {
    let Way::Socks {
        addresses,
        credentials,
        ..
    } = by(address, PASSWORD)
    else {
        unreachable!("`by` makes no other");
    };
    Way::Socks {
        addresses,
        credentials,
        tls: Some(WayTls {
            server_name: name.to_owned(),
            authorities: ca.map(|ca| ca.certificate.clone()),
        }),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_leave_in_the_tls_of_the_proxy_or_not_at_all() {
    let servers = Arc::new(Ca::new("servers"));
    let origin = Origin::tls(&servers, &["api.test", "other.test"], &["h2", "http/1.1"]).await;
    let world = World::new(&servers, origin.address.port(), &[]);
    world.rule("api.test", SECRET);
    let own = Ca::new("of the customer");
    // With its own authorities, and with the host's.
    for (ca, given) in [(&own, Some(&own)), (&*servers, None)] {
        let (address, asked) = socks_in_tls(ca, "proxy.test").await;
        world.way(in_tls(address, "proxy.test", given));
        let guest = world.guest(origin.address, &["api.test", "other.test"]);
        for name in ["api.test", "other.test"] {
            let stream = tls(&world, guest, name, &["http/1.1"]).await.unwrap();
            let mut sender = http1(stream).await;
            let answer = send1(&mut sender, get(name, "/bytes/300000")).await;
            assert_eq!(answer.text.len(), 300_000, "{name}");
        }
        assert_eq!(*asked.lock().unwrap(), [origin.address; 2]);
    }
    let connections = origin.connections();
    let (address, asked) = socks_in_tls(&own, "proxy.test").await;
    let (clear, _) = socks().await;
    for way in [
        in_tls(address, "other.test", Some(&own)),
        in_tls(address, "proxy.test", None),
        in_tls(address, "proxy.test", Some(&servers)),
        // If TLS is required, a proxy without TLS is not used.
        in_tls(clear, "proxy.test", Some(&own)),
        by(address, PASSWORD),
    ] {
        world.way(way.clone());
        let guest = world.guest(origin.address, &["other.test"]);
        tls(&world, guest, "other.test", &[]).await.unwrap_err();
        let call = world.call(guest, |call| call.refused.is_some());
        let refused = call.refused.unwrap();
        assert!(
            refused.contains("egress proxy of the sandbox"),
            "{way:?}: {refused}"
        );
    }
    assert_eq!(
        (origin.connections(), asked.lock().unwrap().len()),
        (connections, 0)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_leave_by_the_proxy_of_the_sandbox() {
    let servers = Arc::new(Ca::new("servers"));
    let origin = Origin::tls(&servers, &["api.test", "other.test"], &["http/1.1"]).await;
    let world = World::new(&servers, origin.address.port(), &[]);
    let (address, asked) = socks().await;
    world.way(by(address, PASSWORD));
    let guest = world.guest(origin.address, &["api.test", "other.test"]);
    world.rule("api.test", SECRET);
    // With a rule and without one.
    for name in ["api.test", "other.test"] {
        let stream = tls(&world, guest, name, &["http/1.1"]).await.unwrap();
        let mut sender = http1(stream).await;
        assert_eq!(send1(&mut sender, get(name, "/")).await.text, "ok");
    }
    assert_eq!(*asked.lock().unwrap(), [origin.address; 2]);
    assert!(!world.log().contains(PASSWORD));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_its_proxy_a_connection_does_not_leave() {
    let servers = Arc::new(Ca::new("servers"));
    let origin = Origin::tls(&servers, &["api.test"], &["http/1.1"]).await;
    let world = World::new(&servers, origin.address.port(), &[]);
    let (address, asked) = socks().await;
    let closed = origin::raw(|stream: TcpStream| async move { drop(stream) }).await;
    let failed = Way::Failed {
        reason: "its name is not resolved".to_owned(),
    };
    let ways = [
        by(address, &PASSWORD.to_uppercase()),
        by(closed, PASSWORD),
        failed,
        Way::Direct,
    ];
    for way in ways {
        world.way(way.clone());
        let guest = world.guest(origin.address, &["api.test"]);
        tls(&world, guest, "api.test", &["http/1.1"])
            .await
            .unwrap_err();
        let call = world.call(guest, |call| call.refused.is_some());
        let refused = call.refused.unwrap();
        assert!(
            refused.contains("egress proxy of the sandbox"),
            "{way:?}: {refused}"
        );
    }
    assert_eq!((origin.connections(), asked.lock().unwrap().len()), (0, 0));
}
