//! The SOCKS5 proxy of a sandbox: a stand-in on the far side of the uplink, and the traffic through it.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    sync::Mutex,
    thread,
};

use serde_json::{Value, json};

use crate::{
    outside::{FAR, NEAR, PORT, with_outside},
    process::{Sandbox, Server},
    secrets::{self, HOST},
};

/// Port of the stand-in at the addresses of the far side. No program listens on the next one.
pub(crate) const SOCKS: u16 = 1080;
const USER: &str = "me";
const PASSWORD: &str = "canary-of-the-proxy";

/// Addresses that clients with the right password asked the stand-in to connect to.
static ASKED: Mutex<Vec<SocketAddr>> = Mutex::new(Vec::new());

/// Serves one connection of a client that knows the password.
pub(crate) fn serve(mut stream: TcpStream) {
    // A client that disconnects early is noticed by the test.
    let _ = relay(&mut stream);
}

fn relay(stream: &mut TcpStream) -> std::io::Result<()> {
    let mut hello = [0; 3];
    stream.read_exact(&mut hello)?;
    assert_eq!(hello, [5, 1, 2], "one method: user name and password");
    stream.write_all(&[5, 2])?;
    let mut version = [0];
    stream.read_exact(&mut version)?;
    let login = [text(stream)?, text(stream)?];
    let is_known = login == [USER, PASSWORD];
    stream.write_all(&[1, u8::from(!is_known)])?;
    let mut request = [0; 10];
    stream.read_exact(&mut request)?;
    assert_eq!(request[..4], [5, 1, 0, 1], "CONNECT to an IPv4 address");
    let address: [u8; 4] = request[4..8].try_into().unwrap();
    let port = u16::from_be_bytes([request[8], request[9]]);
    let remote = SocketAddr::from((Ipv4Addr::from(address), port));
    ASKED.lock().unwrap().push(remote);
    let server = TcpStream::connect(remote)?;
    stream.write_all(&[5, 0, 0, 1, 0, 0, 0, 0, 0, 0])?;
    let (mut up, mut down) = ((stream.try_clone()?, server.try_clone()?), server);
    let sending = thread::spawn(move || {
        let _ = std::io::copy(&mut up.0, &mut up.1);
        up.1.shutdown(std::net::Shutdown::Write)
    });
    let _ = std::io::copy(&mut down, stream);
    // When the server closes its side, the whole connection ends.
    let _ = stream.shutdown(std::net::Shutdown::Both);
    let _ = sending.join();
    Ok(())
}

fn text(stream: &mut TcpStream) -> std::io::Result<String> {
    let mut length = [0];
    stream.read_exact(&mut length)?;
    let mut text = vec![0; usize::from(length[0])];
    stream.read_exact(&mut text)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// The addresses since the last call.
fn asked() -> Vec<String> {
    let asked = std::mem::take(&mut *ASKED.lock().unwrap());
    asked.iter().map(ToString::to_string).collect()
}

/// The options of a sandbox that may reach a name, and an address at every port.
fn network(port: u16, password: &str) -> Value {
    json!({"denyOut": ["0.0.0.0/0"], "allowOut": [HOST, format!("{FAR}/32")], "rules": secrets::rules("key"),
           "egressProxy": {"address": format!("{NEAR}:{port}"), "username": USER, "password": password}})
}

/// The text that an echo server sends to the sandbox, which is admitted by its address.
fn echo(server: &Server, sandbox: &Sandbox) -> String {
    let script = format!(
        "python3 -c 'import socket; s = socket.create_connection((\"{FAR}\", {PORT}), 10); s.settimeout(10); \
         s.sendall(b\"hello\"); print(s.recv(5).decode() or \"closed\")' 2> /dev/null || echo failed"
    );
    server.sh(sandbox, &script).trim().to_owned()
}

pub(crate) fn kvm_all_connections_of_a_sandbox_leave_by_its_proxy_or_not_at_all() {
    with_outside(|| {
        let dir = tempfile::tempdir().unwrap();
        let server = secrets::server(dir.path(), &[]);
        secrets::expect(&server, "canary-by-socks");
        let options = network(SOCKS, PASSWORD);
        let sandbox = server.create(&json!({"network": options}));
        let path = format!("/sandboxes/{}/network", sandbox.id);
        let calls = |sandbox: &Sandbox| {
            ["http", "https"].map(|scheme| secrets::call(&server, sandbox, scheme))
        };
        assert_eq!(calls(&sandbox), ["200 expected", "200 expected"]);
        assert_eq!(asked(), [format!("{NEAR}:80"), format!("{NEAR}:443")]);
        // A port without rules, at an address that the policy allows.
        assert_eq!(echo(&server, &sandbox), "hello");
        assert_eq!(asked(), [format!("{FAR}:{PORT}")]);
        // It does not lift any other part of the policy.
        let denied = format!("curl -s --max-time 3 http://198.51.100.2:{PORT}/ || echo failed");
        assert_eq!(server.sh(&sandbox, &denied).trim(), "failed");
        let made = json!({"count": 1, "timeout": 300});
        let forks = server.post(&format!("/sandboxes/{}/fork", sandbox.id), &made);
        let fork = Sandbox::of(&forks.expect(201).json()[0]["sandbox"]);
        assert_eq!((echo(&server, &fork), asked().len()), ("hello".into(), 1));
        // The password is in no response and in no file.
        let detail = server
            .get(&format!("/sandboxes/{}", sandbox.id))
            .expect(200);
        let shown = json!({"address": format!("{NEAR}:{SOCKS}"), "username": USER});
        assert_eq!(detail.json()["network"]["egressProxy"], shown);
        assert!(!detail.text().contains(PASSWORD));
        assert!(secrets::found_below(server.state.path(), PASSWORD).is_empty());
        // A proxy that refuses the password, and one that is down: nothing leaves, and the record has the reason.
        let recorded = || {
            let events = server.get(&format!("{path}/events")).expect(200).text();
            events.matches("egress proxy of the sandbox").count()
        };
        let mut before = recorded();
        for (port, password) in [(SOCKS, "wrong"), (SOCKS + 1, PASSWORD)] {
            server.put(&path, &network(port, password)).expect(204);
            let failed = calls(&sandbox);
            assert!(failed[1].starts_with("502 "), "{failed:?}");
            assert!(
                failed.iter().all(|said| !said.contains("expected")),
                "{failed:?}"
            );
            assert_ne!(echo(&server, &sandbox), "hello");
            assert_eq!(asked(), Vec::<String>::new(), "{port}");
            crate::process::until("the record has the reason", || recorded() > before);
            before = recorded();
        }
        // Without the option, connections leave directly.
        let mut plain = network(SOCKS, PASSWORD);
        plain.as_object_mut().unwrap().remove("egressProxy");
        server.put(&path, &plain).expect(204);
        assert_eq!(calls(&sandbox), ["200 expected", "200 expected"]);
        assert_eq!(echo(&server, &sandbox), "hello");
        assert_eq!(asked(), Vec::<String>::new());
        // Connections of the fork, whose policy has not changed, still leave through the proxy.
        assert_eq!((echo(&server, &fork), asked().len()), ("hello".into(), 1));
    });
}
