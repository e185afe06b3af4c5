//! Keys of clients on requests for sandboxes.

use std::sync::Arc;

use api::auth::{Authenticator, KeyFile, Rate, Scope};

use crate::guest::Program;
use crate::wire::Wire;
use crate::world::{Setup, World};

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_gets_no_live_key_of_a_client() {
    let dir = tempfile::tempdir().unwrap();
    let file = KeyFile::of(dir.path());
    let key = file.add("k", vec![Scope::SandboxesRead], 0).unwrap();
    let rate = Rate {
        per_second: 1,
        burst: 1,
    };
    let keys = Authenticator::with_keys(file.read().unwrap(), rate);
    let world = World::with(Setup {
        keys: Some(Arc::new(keys)),
        ..Setup::default()
    });
    let world = world.await;
    let program = Program::mirror().await;
    let port = program.port;
    let by_headers = ("/x".to_owned(), world.to(port));
    let by_host = (
        "/x".to_owned(),
        format!("Host: {port}-{}.e2b.test\r\n", world.id),
    );
    let by_path = format!("/sandbox/{}/{port}/x", world.id);
    let by_path = (by_path, "Host: localhost\r\n".to_owned());
    for (path, fields) in [by_headers, by_host, by_path] {
        for (with_key, kept) in [
            (format!("X-API-Key: {key}"), None),
            (format!("x-api-key: of the guest\r\nX-Api-Key: {key}"), None),
            (format!("Authorization: Bearer {key}"), None),
            (format!("authorization: bearer  {key} "), None),
            ("X-API-Key: of-the-guest".to_owned(), Some("of-the-guest")),
            (format!("X-Api-Key: {key}0"), Some("e2b_")),
            ("Authorization: Bearer mine".to_owned(), Some("Bearer mine")),
            (
                "Authorization: Basic dXNlcjo=".to_owned(),
                Some("Basic dXNlcjo="),
            ),
        ] {
            let mut client = Wire::connect(world.address).await;
            let line = format!("GET {path}");
            let reply = client.ask(&line, &format!("{fields}{with_key}\r\n")).await;
            assert_eq!(reply.status, 200, "{with_key}: {}", reply.text());
            let head = reply.text();
            match kept {
                Some(kept) => assert!(head.contains(kept), "{path} {with_key}: {head}"),
                None => assert!(!head.contains(&key), "{path} {with_key}: {head}"),
            }
        }
    }
}
