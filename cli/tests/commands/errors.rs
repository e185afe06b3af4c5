//! Failures: cause, remedy, exit code.

use serde_json::Value;
use testbed::server::{Door, Tls};

use crate::world::{Ran, World, bare};

pub(crate) fn kvm_failures_name_the_cause_and_the_cure() {
    // Nothing listens here, and unlike a recently freed port, no test server gets it.
    let nothing = "http://127.0.0.1:1";
    let words = ["--url", nothing, "sandbox", "list"];
    let ran = Ran::of(&words, bare(&words).output().unwrap()).expect(7);
    assert!(
        ran.stderr.contains("cannot connect") && ran.stderr.contains("cube-api serve"),
        "{}",
        ran.stderr
    );
    let words = ["--url", "localhost", "sandbox", "list"];
    Ran::of(&words, bare(&words).output().unwrap()).expect(2);

    let world = World::with(Door::Locked, Tls::Off);
    let url = world.server.endpoint().to_string();
    let without = |words: &[&str]| {
        Ran::of(
            words,
            bare(words).env("E2B_API_URL", &url).output().unwrap(),
        )
    };
    let ran = without(&["sandbox", "list"]).expect(1);
    assert!(ran.stderr.contains("cube-api key new"), "{}", ran.stderr);
    let ran = without(&["--key", "e2b_wrong", "sandbox", "list"]).expect(1);
    assert!(ran.stderr.contains("cube-api key list"), "{}", ran.stderr);
    without(&["server", "health"]).expect(0);
    world.run(&["run", "--", "true"]).expect(0);

    let ran = world.run(&["template", "delete", "base"]).expect(1);
    assert!(
        ran.stderr.contains("cannot be deleted by clients") && !ran.stderr.contains("key list"),
        "{}",
        ran.stderr
    );
    // The variable belongs to another server.
    let key = world.server.key();
    let words = ["--url", &url, "--key", key, "run", "--", "echo", "here"];
    let elsewhere = |words: &[&str]| {
        let output = bare(words).env("E2B_SANDBOX_URL", nothing).output();
        Ran::of(words, output.unwrap())
    };
    assert_eq!(elsewhere(&words).line(), "here");
    elsewhere(&[&["--sandbox-url", nothing], &words[..]].concat()).expect(125);
    let words = ["run", "--url", &url, "--key", key, "--", "true"];
    elsewhere(&words).expect(0);

    let ran = world
        .run(&["run", "--template", "nope", "--", "true"])
        .expect(125);
    assert!(ran.stderr.contains("\"nope\"") && ran.stderr.contains("cube template list"));
    let ran = world
        .run(&["run", "--image", "127.0.0.1:1/x", "--", "true"])
        .expect(125);
    assert!(ran.stderr.contains("127.0.0.1:1/x"), "{}", ran.stderr);
    let ran = world.run(&["--json", "sandbox", "info", "nope"]).expect(1);
    let error: Value = serde_json::from_str(&ran.stderr).unwrap();
    assert_eq!(
        (&error["kind"], &error["items"][0]["exitCode"]),
        (&"error".into(), &1.into())
    );
    assert!(
        error["items"][0]["cure"]
            .as_str()
            .unwrap()
            .contains("cube sandbox list")
    );
}

pub(crate) fn kvm_a_server_with_tls_needs_a_trusted_certificate() {
    let world = World::with(Door::Locked, Tls::PrivateAuthority);
    let ran = world.run(&["sandbox", "list"]).expect(7);
    assert!(ran.stderr.contains("--ca"), "{}", ran.stderr);
    let authority = world.server.authority();
    let authority = authority.to_str().unwrap();
    let words = ["--ca", authority, "run", "-i", "--", "cat"];
    assert_eq!(
        world.run_with(&words, b"over tls").expect(0).stdout,
        "over tls"
    );
    let words = ["run", "--", "echo", "over tls"];
    let output = world
        .cube(&words)
        .env("SSL_CERT_FILE", authority)
        .output()
        .unwrap();
    assert_eq!(Ran::of(&words, output).line(), "over tls");
    world
        .run(&["--ca", "/nowhere", "sandbox", "list"])
        .expect(6);
}

pub(crate) fn kvm_a_program_that_is_no_server_is_named_by_its_url() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let peer = std::thread::spawn(move || listener.incoming().take(1).for_each(drop));
    let words = ["--url", &url, "sandbox", "list"];
    let ran = Ran::of(&words, bare(&words).output().unwrap()).expect(7);
    peer.join().unwrap();
    let (text, named) = (&ran.stderr, format!("the server at {url} does not respond"));
    assert!(text.contains(&named) && !text.contains("agent"), "{text}");
    assert!(text.contains("cube doctor"), "{text}");
}
