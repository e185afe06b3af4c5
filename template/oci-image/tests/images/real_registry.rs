//! Tests against Debian's `docker-registry`, with passwords and with a token server.

use std::{fs, net::SocketAddr, process::Command, time::SystemTime};

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use oci_image::{
    Client, Limits, PullError, Pulled, Registries, Store,
    registry::{Credentials, tls},
};
use ranges::{Destinations, ForbiddenAddresses};
use ring::{
    rand::SystemRandom,
    signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair},
};

use crate::{
    archive::{Image, dir, file, image, pack},
    mounted::{Mount, converter, run},
    registry::{Registry, with_auth, with_password},
    server::{Server, answer},
};

fn registries(address: SocketAddr) -> Registries {
    let mut registries = Registries::default();
    let endpoint = format!("http://{address}").parse().unwrap();
    registries
        .endpoints
        .insert(address.to_string(), vec![endpoint]);
    registries
}

fn credentials(password: &str) -> Credentials {
    Credentials {
        username: "user".to_owned(),
        password: password.to_owned(),
    }
}

async fn pull(
    registries: Registries,
    registry: &Registry,
    credentials: Option<&Credentials>,
    store: &Store,
) -> Result<Pulled, PullError> {
    let reference = format!("{}/r", registry.address).parse().unwrap();
    let client = Client::new(registries, tls());
    client
        .pull(&reference, credentials, store, &Limits::default())
        .await
}

fn small() -> Image {
    image(&[pack(&[dir("a"), file("a/b", "content")])])
}

#[tokio::test]
async fn image_by_umoci_is_pulled_and_converted() {
    let dir = tempfile::tempdir().unwrap();
    let (layout, tree) = (dir.path().join("layout"), dir.path().join("tree"));
    fs::create_dir_all(tree.join("etc")).unwrap();
    fs::write(tree.join("etc/os-release"), "ID=test\n").unwrap();
    run(Command::new("umoci")
        .args(["init", "--layout"])
        .arg(&layout));
    let name = format!("{}:latest", layout.display());
    run(Command::new("umoci").args(["new", "--image", &name]));
    run(Command::new("umoci")
        .args(["insert", "--image", &name])
        .arg(&tree)
        .arg("/"));
    run(Command::new("umoci").args([
        "config",
        "--image",
        &name,
        "--config.env",
        "A=b",
        "--config.cmd",
        "/bin/sh",
        "--config.user",
        "app",
    ]));
    let read = |digest: &str| fs::read(layout.join("blobs/sha256").join(digest)).unwrap();
    let find = |text: &[u8]| -> Vec<String> {
        let text = String::from_utf8_lossy(text).into_owned();
        text.split("sha256:")
            .skip(1)
            .map(|rest| rest[..64].to_owned())
            .collect()
    };
    let manifest = read(&find(&fs::read(layout.join("index.json")).unwrap())[0]);
    let blobs = find(&manifest);
    let image = Image {
        config: read(&blobs[0]),
        layers: blobs[1..].iter().map(|digest| read(digest)).collect(),
        manifest,
    };
    let registry = Registry::start(dir.path(), "");
    registry.push(&image);
    let store = Store::open(&dir.path().join("store"), 1 << 30).unwrap();
    let pulled = pull(registries(registry.address), &registry, None, &store)
        .await
        .unwrap();
    let defaults = &pulled.config.defaults;
    assert_eq!(defaults.cmd, ["/bin/sh"]);
    assert_eq!(defaults.user.as_deref(), Some("app"));
    assert!(defaults.env.contains(&("A".to_owned(), "b".to_owned())));
    let made = converter().convert(&pulled, &store).unwrap();
    let mount = Mount::of(&made.path());
    assert_eq!(
        fs::read(mount.path().join("etc/os-release")).unwrap(),
        b"ID=test\n"
    );
    // If its layers are in the store, an image needs the registry only for its manifest.
    drop(registry);
    let offline = Registry::start(&dir.path().join("layout"), "");
    let error = pull(registries(offline.address), &offline, None, &store)
        .await
        .unwrap_err();
    assert!(matches!(error, PullError::NotFound(_)), "{error}");
}

#[tokio::test]
async fn image_behind_a_password_is_pulled_with_credentials_only() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(&dir.path().join("store"), 1 << 30).unwrap();
    let registry = with_password(dir.path(), &small());
    let plain = registries(registry.address);
    for wrong in [None, Some(credentials("wrong"))] {
        let error = pull(plain.clone(), &registry, wrong.as_ref(), &store)
            .await
            .unwrap_err();
        assert!(matches!(error, PullError::Unauthorized { .. }), "{error}");
        assert!(!format!("{error:?}").contains("wrong"));
    }
    pull(
        plain.clone(),
        &registry,
        Some(&credentials("secret")),
        &store,
    )
    .await
    .unwrap();
    // Its layers are now in the store. Without credentials the image is still refused.
    let error = pull(plain.clone(), &registry, None, &store)
        .await
        .unwrap_err();
    assert!(matches!(error, PullError::Unauthorized { .. }), "{error}");
    let mut operator = plain;
    let domain = registry.address.to_string();
    operator.credentials.insert(domain, credentials("secret"));
    pull(operator, &registry, None, &store).await.unwrap();
}

#[tokio::test]
async fn image_behind_a_token_server_is_pulled() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(&dir.path().join("store"), 1 << 30).unwrap();
    let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).unwrap();
    let certificate = rcgen::CertificateParams::new(Vec::new())
        .unwrap()
        .self_signed(&key)
        .unwrap();
    let bundle = dir.path().join("bundle.pem");
    fs::write(&bundle, certificate.pem()).unwrap();
    let tokens = Server::default();
    let token_address = tokens.start().await;
    let auth = format!(
        "auth: {{token: {{realm: 'http://{token_address}/token', service: reg, issuer: us, rootcertbundle: {}}}}}\n",
        bundle.display()
    );
    let registry = with_auth(dir.path(), &small(), &auth);
    let path = "/token?scope=repository%3Ar%3Apull&service=reg";
    let mut open = registries(registry.address);
    let loopback = Destinations {
        block: "127.0.0.0/8".parse().unwrap(),
        access: Vec::new(),
    };
    open.forbidden = ForbiddenAddresses::new(vec![loopback], Vec::new());
    let valid = jwt(&key, certificate.der(), 300);
    let body = format!(r#"{{"token":"{valid}"}}"#);
    tokens.set(path, answer(200, &[], body.as_bytes()));
    pull(
        open.clone(),
        &registry,
        Some(&credentials("secret")),
        &store,
    )
    .await
    .unwrap();
    let sent = tokens.requests.lock().unwrap()[0].clone();
    assert_eq!(
        sent,
        (path.to_owned(), Some("Basic dXNlcjpzZWNyZXQ=".to_owned()))
    );
    // Refused by the token server, then an expired token that the registry refuses.
    tokens.set(path, answer(401, &[], b""));
    let error = pull(open.clone(), &registry, None, &store)
        .await
        .unwrap_err();
    assert!(matches!(error, PullError::Unauthorized { .. }), "{error}");
    let expired = jwt(&key, certificate.der(), -300);
    let body = format!(r#"{{"access_token":"{expired}"}}"#);
    tokens.set(path, answer(200, &[], body.as_bytes()));
    let error = pull(open.clone(), &registry, None, &store)
        .await
        .unwrap_err();
    assert!(matches!(error, PullError::Unauthorized { .. }), "{error}");
    for nonsense in [&b"{}"[..], b"{\"token\":\"a\\nb\"}", &[b'x'; 1 << 17]] {
        tokens.set(path, answer(200, &[], nonsense));
        pull(open.clone(), &registry, None, &store)
            .await
            .unwrap_err();
    }
    // The realm is on this host, which is forbidden.
    let error = pull(registries(registry.address), &registry, None, &store)
        .await
        .unwrap_err();
    assert!(error.to_string().contains("forbidden range"), "{error}");
}

/// A token for pulling `r` that expires after `seconds`.
fn jwt(key: &rcgen::KeyPair, certificate: &[u8], seconds: i64) -> String {
    let now = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap();
    let now = i64::try_from(now.as_secs()).unwrap();
    let certificate = base64::prelude::BASE64_STANDARD.encode(certificate);
    let head = format!(r#"{{"typ":"JWT","alg":"ES256","x5c":["{certificate}"]}}"#);
    let claims = format!(
        r#"{{"iss":"us","aud":"reg","sub":"user","jti":"1","nbf":{},"iat":{},"exp":{},
            "access":[{{"type":"repository","name":"r","actions":["pull"]}}]}}"#,
        now - 600,
        now - 600,
        now + seconds
    );
    let encode = |bytes: &[u8]| BASE64_URL_SAFE_NO_PAD.encode(bytes);
    let text = format!("{}.{}", encode(head.as_bytes()), encode(claims.as_bytes()));
    let random = SystemRandom::new();
    let pair = EcdsaKeyPair::from_pkcs8(
        &ECDSA_P256_SHA256_FIXED_SIGNING,
        &key.serialize_der(),
        &random,
    );
    let signature = pair.unwrap().sign(&random, text.as_bytes()).unwrap();
    format!("{text}.{}", encode(signature.as_ref()))
}
