//! A server with TLS is replaced.

use std::{
    fs,
    net::{SocketAddr, TcpStream},
    path::Path,
    sync::{Arc, atomic::Ordering},
    thread,
};

use api::tls::ca;
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    pki_types::{CertificateDer, pem::PemObject},
};

use crate::{
    process::{PATIENCE, Server, until},
    streams::{self, Load},
};

type Secured = StreamOwned<ClientConnection, TcpStream>;

/// A client that trusts both authorities of a test.
struct Client {
    config: Arc<ClientConfig>,
    address: SocketAddr,
}

impl Client {
    fn new(authorities: &[&Path], address: SocketAddr) -> Self {
        let mut roots = RootCertStore::empty();
        for dir in authorities {
            let ca = CertificateDer::from_pem_file(dir.join("ca.crt")).unwrap();
            roots.add(ca).unwrap();
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        Self {
            config: Arc::new(config),
            address,
        }
    }

    fn connect(&self) -> Secured {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let name = "localhost".try_into().unwrap();
        let client = ClientConnection::new(Arc::clone(&self.config), name).unwrap();
        StreamOwned::new(client, stream)
    }

    /// The certificate that a new connection gets.
    fn certificate(&self) -> CertificateDer<'static> {
        let stream = streams::idle(self.connect());
        let chain = stream.get_ref().conn.peer_certificates();
        chain.unwrap()[0].clone().into_owned()
    }
}

pub(crate) fn kvm_connections_with_tls_live_through_a_reload_with_another_certificate() {
    let dir = tempfile::tempdir().unwrap();
    let [one, two] = ["one", "two"].map(|name| {
        let dir = dir.path().join(name);
        ca::init(&dir, "api.test")
            .map(|files| (dir, files))
            .unwrap()
    });
    let (certificate, key) = (dir.path().join("server.crt"), dir.path().join("server.key"));
    let install = |files: &ca::CaFiles| {
        fs::copy(&files.certificate, &certificate).unwrap();
        fs::copy(&files.key, &key).unwrap();
    };
    install(&one.1);
    let server = Server::with(&[
        "--insecure-loopback",
        "--warm",
        "0:0",
        "--tls-cert",
        certificate.to_str().unwrap(),
        "--tls-key",
        key.to_str().unwrap(),
    ]);
    let client = Client::new(&[&one.0, &two.0], server.address);
    let leaf = |files: &ca::CaFiles| CertificateDer::from_pem_file(&files.certificate).unwrap();
    assert_eq!(client.certificate(), leaf(&one.1));
    let load = Load::default();
    let answered = || load.answered.load(Ordering::Relaxed);
    thread::scope(|scope| {
        let (client, load) = (&client, &load);
        let clients = [
            scope.spawn(|| streams::keep_alive_on(|| client.connect(), load)),
            scope.spawn(|| {
                while !load.is_over() {
                    streams::ask_once(client.connect());
                    load.answered.fetch_add(1, Ordering::Relaxed);
                }
            }),
        ];
        let go_on = || {
            let before = answered();
            until("requests are answered", || answered() > before + 20);
            assert!(clients.iter().all(|client| !client.is_finished()));
        };
        go_on();
        let mut kept = streams::idle(client.connect());
        install(&two.1);
        server.reload().unwrap();
        assert_eq!(client.certificate(), leaf(&two.1));
        assert!(streams::ask_again(&mut kept));
        go_on();
        load.over.store(true, Ordering::Relaxed);
    });
}
