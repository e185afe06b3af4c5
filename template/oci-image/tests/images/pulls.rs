//! Pulls from registries that stall, send wrong data, redirect, and require credentials.

use std::{
    net::SocketAddr,
    path::Path,
    time::{Duration, Instant},
};

use oci_image::{
    Client, ConvertError, Limits, Program, PullError, Pulled, Registries, Resources, Store,
    digest::Digest,
    registry::{Credentials, HttpError, tls},
    store::StoreError,
};
use ranges::{Destinations, ForbiddenAddresses, Refused};

use crate::{
    archive::{Image, MANIFEST, file, image, image_by, pack, stored},
    server::{Reply, Server, answer},
};

fn small() -> Image {
    image(&[pack(&[file("a", "1")]), pack(&[file("b", "2")])])
}

fn registries(address: SocketAddr) -> Registries {
    let mut registries = Registries::default();
    let endpoint = format!("http://{address}").parse().unwrap();
    registries
        .endpoints
        .insert(address.to_string(), vec![endpoint]);
    registries.timeouts.stall = Duration::from_millis(300);
    registries
}

/// Pulls `r:latest` into a new store. Checks that an error leaves no incomplete blob.
async fn pull_with(
    registries: Registries,
    address: SocketAddr,
    credentials: Option<&Credentials>,
) -> Result<Pulled, PullError> {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), 1 << 30).unwrap();
    let client = Client::new(registries, tls());
    let reference = format!("{address}/r").parse().unwrap();
    let result = client
        .pull(&reference, credentials, &store, &Limits::default())
        .await;
    // A failed pull does not wait for layers that are being synced.
    let drafts = dir.path().join("drafts");
    let deadline = Instant::now() + Duration::from_secs(60);
    while std::fs::read_dir(&drafts).unwrap().count() > 0 {
        assert!(Instant::now() < deadline, "a draft is left");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    for blob in std::fs::read_dir(dir.path().join("blobs")).unwrap() {
        let path = blob.unwrap().path();
        let digest = Digest::of(&std::fs::read(&path).unwrap());
        assert_eq!(
            path.file_name().unwrap().to_str(),
            Some(digest.hex().as_str())
        );
    }
    result
}

async fn pull(server: &Server) -> Result<Pulled, PullError> {
    let address = server.start().await;
    pull_with(registries(address), address, None).await
}

/// Path of the first layer's blob.
fn layer(image: &Image) -> String {
    format!("/v2/r/blobs/{}", Digest::of(&image.layers[0]))
}

#[tokio::test]
async fn large_blobs_are_summed_by_the_program_in_its_control_group() {
    let noise: Vec<u8> = (0..500_000_u32).flat_map(u32::to_le_bytes).collect();
    let image = image_by(&[pack(&[file("a", noise)])], stored);
    let server = Server::of(&image);
    let address = server.start().await;
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(&dir.path().join("store"), 1 << 30).unwrap();
    let reference = format!("{address}/r").parse().unwrap();
    let procs = dir.path().join("cgroup.procs");
    let pull = async |program: &str| {
        let program = Program::new(Path::new(program), Resources::default());
        let program = program.in_group(Some(procs.clone()));
        let client = Client::new(registries(address), tls()).summing_by(program);
        let limits = Limits::default();
        client.pull(&reference, None, &store, &limits).await
    };
    let error = pull("/bin/false").await.unwrap_err();
    let of_program = matches!(error, PullError::Sum(ConvertError::Ended(_)));
    assert!(of_program, "{error}");
    // The same number of different bytes.
    let program = env!("CARGO_BIN_EXE_cube-image");
    let mut other = image.layers[0].clone();
    other[1 << 20] ^= 1;
    server.set(&layer(&image), answer(200, &[], &other));
    let error = pull(program).await.unwrap_err();
    let is_found = matches!(error, PullError::Store(StoreError::Digest { .. }));
    assert!(is_found, "{error}");
    server.set(&layer(&image), answer(200, &[], &image.layers[0]));
    std::fs::remove_file(&procs).unwrap();
    let pulled = pull(program).await.unwrap();
    let blob = std::fs::read(pulled.layers[0].blob.path()).unwrap();
    assert!(blob == image.layers[0]);
    let pid: u32 = std::fs::read_to_string(&procs).unwrap().parse().unwrap();
    assert_ne!(pid, std::process::id());
}

#[tokio::test]
async fn images_are_pulled_by_tag_and_through_indexes() {
    let image = small();
    let server = Server::of(&image);
    let pulled = pull(&server).await.unwrap();
    assert_eq!(pulled.digest, Digest::of(&image.manifest));
    assert_eq!(
        pulled.config.defaults.env,
        [("A".to_owned(), "b".to_owned())]
    );
    assert_eq!(pulled.layers.len(), 2);
    let (digest, size) = (pulled.digest, image.manifest.len());
    let index = format!(
        r#"{{"manifests":[{{"digest":"{digest}","size":{size},"platform":{{"os":"linux","architecture":"amd64"}}}}]}}"#
    );
    let kind = [("Content-Type", "application/vnd.oci.image.index.v1+json")];
    server.set(
        "/v2/r/manifests/latest",
        answer(200, &kind, index.as_bytes()),
    );
    let path = format!("/v2/r/manifests/{digest}");
    server.set(
        &path,
        answer(200, &[("Content-Type", MANIFEST)], &image.manifest),
    );
    assert_eq!(pull(&server).await.unwrap().digest, digest);
    // The index names a digest. Different bytes are rejected.
    let other = [&image.manifest[..], b" "].concat();
    server.set(&path, answer(200, &[("Content-Type", MANIFEST)], &other));
    let error = pull(&server).await.unwrap_err();
    assert!(matches!(error, PullError::Digest { .. }), "{error}");
    server.set(&path, answer(200, &kind, index.as_bytes()));
    assert!(pull(&server).await.is_err());
}

#[tokio::test]
async fn a_stalling_or_breaking_registry_ends_the_pull() {
    let image = small();
    let server = Server::of(&image);
    let head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n";
    for reply in [Reply::Stall(Vec::new()), Reply::Stall(head.to_vec())] {
        server.set(&layer(&image), reply);
        let error = pull(&server).await.unwrap_err();
        assert!(
            matches!(error, PullError::Http(HttpError::Stalled { .. })),
            "{error}"
        );
    }
    for bytes in [&b"HTTP/1.1 200 OK\r\nContent-Le"[..], b"\0\0\0", b""] {
        server.set(&layer(&image), Reply::Raw(bytes.to_vec()));
        let error = pull(&server).await.unwrap_err();
        assert!(
            matches!(error, PullError::Http(HttpError::Exchange { .. })),
            "{error}"
        );
    }
    // A connection that breaks once is retried.
    let whole = answer(200, &[], &image.layers[0]);
    server.set_all(
        &layer(&image),
        vec![Reply::Raw(Vec::new()), answer(503, &[], b""), whole],
    );
    pull(&server).await.unwrap();
}

#[tokio::test]
async fn the_deadline_ends_a_pull_that_only_trickles() {
    let image = small();
    let server = Server::of(&image);
    server.set(&layer(&image), Reply::Stall(Vec::new()));
    let address = server.start().await;
    let mut registries = registries(address);
    registries.timeouts.stall = Duration::from_secs(60);
    registries.timeouts.pull = Duration::from_millis(300);
    let error = pull_with(registries, address, None).await.unwrap_err();
    assert!(matches!(error, PullError::Deadline(_)), "{error}");
}

#[tokio::test]
async fn lies_about_sizes_and_contents_are_found() {
    let image = small();
    let server = Server::of(&image);
    let blob = &image.layers[0];
    let longer = [&blob[..], b"x"].concat();
    for body in [&longer[..], &blob[..5]] {
        // Announced correctly, but too long when received.
        server.set(&layer(&image), answer(200, &[], body));
        let error = pull(&server).await.unwrap_err();
        assert!(matches!(error, PullError::Length { .. }), "{error}");
        let mut raw = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n".to_vec();
        raw.extend(body);
        server.set(&layer(&image), Reply::Raw(raw));
        let error = pull(&server).await.unwrap_err();
        assert!(matches!(error, PullError::Length { .. }), "{error}");
    }
    let mut other = blob.clone();
    other[10] ^= 1;
    server.set(&layer(&image), answer(200, &[], &other));
    let error = pull(&server).await.unwrap_err();
    assert!(
        matches!(error, PullError::Store(StoreError::Digest { .. })),
        "{error}"
    );
    let kind = [("Content-Type", MANIFEST)];
    let large = vec![b' '; (4 << 20) + 1];
    server.set("/v2/r/manifests/latest", answer(200, &kind, &large));
    let error = pull(&server).await.unwrap_err();
    assert!(
        matches!(error, PullError::Http(HttpError::TooLarge { .. })),
        "{error}"
    );
    let size = format!("\"size\":{}", image.layers[0].len());
    let text = String::from_utf8(image.manifest).unwrap();
    let huge = text.replace(&size, "\"size\":18446744073709551615");
    server.set(
        "/v2/r/manifests/latest",
        answer(200, &kind, huge.as_bytes()),
    );
    let error = pull(&server).await.unwrap_err();
    assert!(matches!(error, PullError::Manifest(_)), "{error}");
}

#[tokio::test]
async fn forbidden_addresses_are_refused_by_name_redirect_and_realm() {
    let image = small();
    let server = Server::of(&image);
    let address = server.start().await;
    // By address and by name. No endpoint is listed.
    let client = Client::new(Registries::default(), tls());
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), 1 << 30).unwrap();
    let (port, limits) = (address.port(), Limits::default());
    for host in [
        "127.0.0.1",
        "[::1]",
        "localhost",
        "169.254.169.254",
        "[::ffff:10.0.0.1]",
        "0.0.0.0",
    ] {
        let reference = format!("{host}:{port}/r").parse().unwrap();
        let pull = client.pull(&reference, None, &store, &limits);
        let error = pull.await.unwrap_err();
        assert!(
            matches!(error, PullError::Http(HttpError::Refused { .. })),
            "{host}: {error}"
        );
    }
    // By redirect and by realm of a listed registry: another port of its host is another server.
    let inner = Server::default().start().await;
    for target in [inner.to_string(), "169.254.169.254".to_owned()] {
        let to = format!("http://{target}/latest/meta-data");
        server.set(&layer(&image), answer(307, &[("Location", &to)], b""));
        let error = pull_with(registries(address), address, None)
            .await
            .unwrap_err();
        assert!(
            matches!(error, PullError::Http(HttpError::Refused { .. })),
            "{error}"
        );
        let realm = format!("Bearer realm=\"{to}\"");
        server.set(
            &layer(&image),
            answer(401, &[("WWW-Authenticate", &realm)], b""),
        );
        let error = pull_with(registries(address), address, None)
            .await
            .unwrap_err();
        assert!(
            matches!(error, PullError::Http(HttpError::Refused { .. })),
            "{error}"
        );
    }
    assert!(error_free(&server));
}

fn loopback() -> Vec<Destinations> {
    vec![Destinations {
        block: "127.0.0.0/8".parse().unwrap(),
        access: Vec::new(),
    }]
}

#[tokio::test]
async fn an_address_that_the_operator_denies_is_refused_although_it_is_opened() {
    let image = small();
    let address = Server::of(&image).start().await;
    let pull = async |registries: Registries| {
        let client = Client::new(registries, tls());
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path(), 1 << 30).unwrap();
        let reference = format!("{address}/r").parse().unwrap();
        let limits = Limits::default();
        let pulled = client.pull(&reference, None, &store, &limits);
        pulled.await.unwrap_err()
    };
    let with = |denied| Registries {
        forbidden: ForbiddenAddresses::new(loopback(), denied),
        ..Registries::default()
    };
    // The server does not speak TLS.
    let opened = pull(with(Vec::new())).await;
    let is_refused = |e: &PullError| matches!(e, PullError::Http(HttpError::Refused { .. }));
    assert!(!is_refused(&opened), "{opened}");
    let denied = pull(with(loopback())).await;
    assert!(is_refused(&denied), "{denied}");
}

#[test]
fn net_a_registry_on_this_host_must_be_opened_by_its_address() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return;
    }
    let thread = std::thread::spawn(|| {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
        for line in ["link set lo up", "addr add 203.0.113.3/32 dev lo"] {
            let status = std::process::Command::new("ip")
                .args(line.split(' '))
                .status();
            assert!(status.unwrap().success(), "ip {line}");
        }
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        let opened = Destinations {
            block: "203.0.113.3/32".parse().unwrap(),
            access: Vec::new(),
        };
        let pull = async |exceptions| {
            let registries = Registries {
                forbidden: ForbiddenAddresses::new(exceptions, Vec::new()),
                ..Registries::default()
            };
            let address = "203.0.113.3:9".parse().unwrap();
            pull_with(registries, address, None).await.unwrap_err()
        };
        runtime.unwrap().block_on(async {
            let own = pull(Vec::new()).await;
            let is_own = matches!(
                &own,
                PullError::Http(HttpError::Refused {
                    why: Refused::Host(_),
                    ..
                })
            );
            assert!(is_own, "{own}");
            // No server listens there.
            let named = pull(vec![opened]).await;
            let is_connected = matches!(&named, PullError::Http(HttpError::Connect { .. }));
            assert!(is_connected, "{named}");
        });
    });
    thread.join().unwrap();
}

/// Whether only paths of the registry were requested.
fn error_free(server: &Server) -> bool {
    server.paths().iter().all(|path| path.starts_with("/v2/r/"))
}

#[tokio::test]
async fn opened_blocks_are_reached_and_redirects_drop_credentials() {
    let image = small();
    let cdn = Server::default();
    cdn.set("/blob?sig=1", answer(200, &[], &image.layers[0]));
    let cdn_address = cdn.start().await;
    let server = Server::of(&image);
    let to = format!("http://{cdn_address}/blob?sig=1");
    let basic = answer(401, &[("WWW-Authenticate", "Basic realm=\"r\"")], b"");
    let manifest = answer(200, &[("Content-Type", MANIFEST)], &image.manifest);
    server.set_all("/v2/r/manifests/latest", vec![basic, manifest]);
    server.set(&layer(&image), answer(307, &[("Location", &to)], b""));
    let address = server.start().await;
    let mut registries = registries(address);
    registries.forbidden = ForbiddenAddresses::new(loopback(), Vec::new());
    let credentials = Credentials {
        username: "u".to_owned(),
        password: "p".to_owned(),
    };
    pull_with(registries.clone(), address, Some(&credentials))
        .await
        .unwrap();
    assert_eq!(
        *cdn.requests.lock().unwrap(),
        [("/blob?sig=1".to_owned(), None)]
    );
    let sent = server.requests.lock().unwrap().clone();
    assert_eq!(sent[0].1, None);
    assert_eq!(sent[1].1.as_deref(), Some("Basic dTpw"));
    // The number of redirects is limited.
    for to in [
        "/v2/r/blobs/loop",
        "//other/x",
        "ftp://x/",
        "http://u@x/",
        "",
        "\\",
    ] {
        server.set(
            "/v2/r/blobs/loop",
            answer(302, &[("Location", "/v2/r/blobs/loop")], b""),
        );
        server.set(&layer(&image), answer(302, &[("Location", to)], b""));
        let error = pull_with(registries.clone(), address, None)
            .await
            .unwrap_err();
        let expected = matches!(
            error,
            PullError::Http(HttpError::Redirects { .. } | HttpError::Redirect { .. })
        );
        assert!(expected, "{to}: {error}");
    }
}

#[tokio::test]
async fn refusals_are_told_apart() {
    let image = small();
    let server = Server::of(&image);
    for (status, part) in [
        (
            404,
            "not found: the image or tag does not exist in the registry",
        ),
        (401, "unsupported authentication"),
        (403, "denies access"),
        (429, "rate"),
        (500, "500"),
    ] {
        server.set("/v2/r/manifests/latest", answer(status, &[], b""));
        let error = pull(&server).await.unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    let basic = answer(401, &[("WWW-Authenticate", "Basic realm=\"r\"")], b"");
    server.set("/v2/r/manifests/latest", basic);
    let error = pull(&server).await.unwrap_err().to_string();
    assert!(error.contains("credentials"), "{error}");
}

#[tokio::test]
async fn a_mirror_that_fails_is_followed_by_the_next_endpoint() {
    let image = small();
    let (broken, good) = (Server::default(), Server::of(&image));
    let (first, second) = (broken.start().await, good.start().await);
    let mut registries = registries(second);
    let list = [first, second].map(|address| format!("http://{address}").parse().unwrap());
    registries
        .endpoints
        .insert(second.to_string(), list.to_vec());
    pull_with(registries, second, None).await.unwrap();
    assert_eq!(broken.paths(), ["/v2/r/manifests/latest"]);
}
