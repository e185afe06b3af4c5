//! API keys of a running server.

use std::{
    fs::{self, OpenOptions, Permissions},
    os::unix::fs::PermissionsExt,
    path::Path,
    process::Command,
};

use api::auth::KeyFile;
use power_loss::{Recording, TRACED};

use crate::{
    http::{self, Answer},
    process::{Server, until},
};

fn command(server: &Server, words: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_cube-api"))
        .args(words)
        .arg("--state")
        .arg(server.state.path())
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

fn get(server: &Server, path: &str, key: &str) -> Answer {
    http::send(server.address, "GET", path, &[("X-API-KEY", key)], b"")
}

pub(crate) fn kvm_keys_open_what_their_scopes_say() {
    let server = Server::with(&["--warm", "0:0", "--rate", "20"]);
    server.get("/health").expect(200);
    server.get("/openapi.json").expect(200);
    for path in ["/v2/sandboxes", "/metrics", "/templates", "/api-keys"] {
        server.get(path).expect(401);
    }
    // Unknown routes answer the same with and without a key.
    server.get("/no/such/route").expect(404);
    let key = command(
        &server,
        &["key", "new", "reader", "--scope", "sandboxes:read"],
    );
    until("the key is accepted", || {
        get(&server, "/v2/sandboxes", &key).status == 200
    });
    get(&server, "/metrics", &key).expect(403);
    let listed = get(&server, "/api-keys", &key).expect(200).json();
    assert_eq!(listed[0]["name"], "reader");
    assert_eq!(listed[0]["scopes"][0], "sandboxes:read");
    let fields = listed[0].as_object().unwrap().len();
    assert_eq!((listed.as_array().unwrap().len(), fields), (1, 4));
    let headers = [("X-API-KEY", key.as_str())];
    let body = br#"{"templateID":"base"}"#;
    http::send(server.address, "POST", "/v2/sandboxes", &headers, body).expect(403);
    let bearer = format!("Bearer {key}");
    let teams = http::send(
        server.address,
        "GET",
        "/teams",
        &[("Authorization", &bearer)],
        b"",
    );
    assert_eq!(teams.expect(200).json()[0]["apiKey"], key.as_str());
    let list = command(&server, &["key", "list"]);
    assert!(
        list.contains("sandboxes:read  reader") && !list.contains(&key),
        "{list}"
    );
    let too_many = (0..200).map(|_| get(&server, "/v2/sandboxes", &key));
    let refused = too_many.into_iter().find(|answer| answer.status == 429);
    let refused = refused.expect("the rate limit has no effect").expect(429);
    assert_eq!(refused.header("retry-after"), Some("1"));
    command(&server, &["key", "revoke", "reader"]);
    until("the key is rejected", || {
        get(&server, "/v2/sandboxes", &key).status == 401
    });
}

/// Records the system calls of `key new` and `key revoke`, and reads the key file in every state in which a crash of
/// the host can leave it. The output of a command is its promise.
pub(crate) fn kvm_a_printed_key_survives_a_power_loss() {
    let commands = [
        "key new ci --state ROOT/state",
        "key revoke ci --state ROOT/state",
    ];
    let recording = record(&commands);
    assert_eq!(broken_promise(&recording), None);
    for (number, path) in recording.syncs() {
        let broken = broken_promise(&recording.without(number));
        println!("without the sync of {}: {broken:?}", path.display());
        // The second command syncs the name of the state directory again.
        assert!(
            broken.is_some() || path.as_os_str().is_empty(),
            "{}",
            path.display()
        );
    }
}

/// Records the system calls of `ca init`. When it prints how to use the certificates, all of them survive a crash of the
/// host.
pub(crate) fn kvm_created_certificates_survive_a_power_loss() {
    let recording = record(&["ca init ROOT/new/ca --domain e2b.test"]);
    assert_eq!(broken_certificate(&recording), None);
    for (number, path) in recording.syncs() {
        let broken = broken_certificate(&recording.without(number));
        println!("without the sync of {}: {broken:?}", path.display());
        assert!(broken.is_some(), "{}", path.display());
    }
}

/// A file that a crash damages after the command has printed its answer.
fn broken_certificate(recording: &Recording) -> Option<String> {
    recording.crashes().into_iter().find_map(|crash| {
        let marks = recording.marks(crash.at);
        if !marks.iter().any(|mark| mark.starts_with("export ")) {
            return None;
        }
        let found = tempfile::tempdir().unwrap();
        let unchanged = |_: &Path, bytes: &[u8]| bytes.to_vec();
        crash.tree.write(found.path(), unchanged).unwrap();
        let file = |name: &str| found.path().join("new/ca").join(name);
        let is_damaged = |(name, end): &&(&str, &str)| {
            !fs::read_to_string(file(name)).is_ok_and(|text| text.trim_end().ends_with(end))
        };
        let authority = [
            ("ca.crt", "-----END CERTIFICATE-----"),
            ("ca.key", "-----END PRIVATE KEY-----"),
        ];
        if let Some((name, _)) = authority.iter().find(is_damaged) {
            return Some(format!("{name} is lost or damaged"));
        }
        // A recording has no modes of files.
        let private = fs::set_permissions(file("server.key"), Permissions::from_mode(0o600));
        if let Err(why) = private {
            return Some(why.to_string());
        }
        let loaded = api::tls::load(&file("server.crt"), &file("server.key"));
        loaded.err().map(|why| why.to_string())
    })
}

/// Records the system calls of commands of `cube-api`; `ROOT` becomes a new directory.
fn record(commands: &[&str]) -> Recording {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().canonicalize().unwrap();
    let (all, printed, trace) = (root.join("all"), root.join("printed"), root.join("trace"));
    fs::create_dir(&all).unwrap();
    for command in commands {
        let out = || {
            OpenOptions::new()
                .create(true)
                .append(true)
                .open(&printed)
                .unwrap()
        };
        let status = Command::new("strace")
            .args(TRACED)
            .args(["-A", "-o"])
            .arg(&trace)
            .arg(env!("CARGO_BIN_EXE_cube-api"))
            .args(command.replace("ROOT", all.to_str().unwrap()).split(' '))
            .stdout(out())
            .stderr(out())
            .status()
            .expect("strace: apt-get install strace");
        assert!(status.success(), "{status}");
    }
    let trace = fs::read_to_string(&trace).unwrap();
    Recording::new(&trace, &all, &printed).unwrap()
}

/// The first promise that a crash breaks.
fn broken_promise(recording: &Recording) -> Option<String> {
    recording.crashes().into_iter().find_map(|crash| {
        let marks = recording.marks(crash.at);
        let is_printed = marks.iter().any(|mark| mark.starts_with("e2b_"));
        let is_revoked = marks.iter().any(|mark| mark.starts_with("revoked"));
        let found = tempfile::tempdir().unwrap();
        let unchanged = |_: &Path, bytes: &[u8]| bytes.to_vec();
        crash.tree.write(found.path(), unchanged).unwrap();
        let keys = match KeyFile::of(&found.path().join("state")).read() {
            Ok(keys) => keys,
            Err(e) => return Some(e.to_string()),
        };
        if is_printed && keys.len() != 1 {
            return Some("a printed key is gone".to_owned());
        }
        let is_live = keys.iter().any(|key| key.revoked_unix_s.is_none());
        (is_revoked && is_live).then(|| "a revoked key is live".to_owned())
    })
}
