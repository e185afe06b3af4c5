//! `filesystem.Filesystem`: `Stat`, `ListDir`, `MakeDir`, `Move`, `Remove`.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod agent;

use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    path::Path,
    process::Command,
    time::{SystemTime, UNIX_EPOCH},
};

use agent::{Agent, is_root, refusal};
use envd::{
    ClientError, Empty, EntryInfo, EntryResponse, EnvdClient, FileType, ListDirRequest,
    ListDirResponse, MoveRequest, PathRequest,
};

fn on_path<A: serde::de::DeserializeOwned>(
    client: &mut EnvdClient,
    method: &str,
    path: &str,
) -> Result<A, ClientError> {
    let request = PathRequest { path: path.into() };
    client.call(&format!("filesystem.Filesystem/{method}"), &request)
}

fn stat(client: &mut EnvdClient, path: &str) -> Result<EntryInfo, ClientError> {
    let answer: EntryResponse = on_path(client, "Stat", path)?;
    Ok(answer.entry.unwrap())
}

fn list(client: &mut EnvdClient, path: &str, depth: u32) -> Result<Vec<EntryInfo>, ClientError> {
    let path = path.to_owned();
    let request = ListDirRequest { path, depth };
    let answer: ListDirResponse = client.call("filesystem.Filesystem/ListDir", &request)?;
    Ok(answer.entries)
}

fn rename(client: &mut EnvdClient, from: &str, to: &str) -> Result<EntryInfo, ClientError> {
    let request = MoveRequest {
        source: from.into(),
        destination: to.into(),
    };
    let answer: EntryResponse = client.call("filesystem.Filesystem/Move", &request)?;
    Ok(answer.entry.unwrap())
}

/// HTTP status and Connect code of a refusal.
fn code<T: std::fmt::Debug>(result: Result<T, ClientError>) -> (u16, String) {
    let (status, code, message) = refusal(result.unwrap_err());
    assert!(!message.is_empty());
    (status, code)
}

fn is(status: u16, code: &str) -> (u16, String) {
    (status, code.to_owned())
}

#[test]
fn entries_describe_files_directories_and_links() {
    let agent = Agent::start();
    let mut client = agent.client();
    let path = agent.path("dir/f");
    client.write_file(&path, b"hello", None).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    let file = stat(&mut client, &path).unwrap();
    let me = Command::new("id").arg("-un").output().unwrap().stdout;
    let me = String::from_utf8(me).unwrap();
    assert_eq!(
        (file.name.as_str(), file.path.as_str()),
        ("f", path.as_str())
    );
    assert_eq!(
        (file.kind, file.size, file.mode),
        (FileType::File, 5, 0o640)
    );
    assert_eq!(file.permissions, "-rw-r-----");
    assert_eq!(
        (file.owner.as_str(), file.symlink_target),
        (me.trim(), None)
    );
    let written = file.modified_time.unwrap().unix_ns() / 1_000_000_000;
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_secs();
    assert!(now - written < 600, "{written}");
    let dir = stat(&mut client, &agent.path("dir/")).unwrap();
    assert_eq!((dir.kind, dir.name.as_str()), (FileType::Directory, "dir"));
    assert_eq!(dir.path, agent.path("dir"));
    // Links are not followed, except for type and mode.
    symlink(&path, agent.path("link")).unwrap();
    let link = stat(&mut client, &agent.path("link")).unwrap();
    assert_eq!((link.kind, link.mode), (FileType::File, 0o640));
    assert_eq!(link.path, agent.path("link"));
    let real = fs::canonicalize(&path).unwrap();
    assert_eq!(link.symlink_target.as_deref(), real.to_str());
    // As parsed by the SDKs.
    let body = serde_json::to_vec(&PathRequest { path: path.clone() }).unwrap();
    let json = [("content-type", "application/json")];
    let answer = client.request("POST", "/filesystem.Filesystem/Stat", &json, &body);
    let answer = answer.unwrap();
    assert_eq!(answer.header("content-type"), Some("application/json"));
    let text = String::from_utf8(answer.body).unwrap();
    assert!(text.contains(r#""type":"FILE_TYPE_FILE""#), "{text}");
    assert!(text.contains(r#""size":"5","mode":416"#), "{text}");
    assert!(
        !text.contains("isSymlink") && !text.contains("symlinkTarget"),
        "{text}"
    );
    // Missing paths.
    for missing in [
        agent.path("none"),
        format!("{path}/below"),
        agent.path("none/none"),
    ] {
        assert_eq!(code(stat(&mut client, &missing)), is(404, "not_found"));
    }
    assert_eq!(code(stat(&mut client, "a\0b")), is(400, "invalid_argument"));
    assert_eq!(code(stat(&mut client, "~x/y")), is(400, "invalid_argument"));
    let long = agent.path(&"x".repeat(300));
    assert_eq!(code(stat(&mut client, &long)), is(400, "invalid_argument"));
}

#[test]
fn entries_include_metadata_of_uploads() {
    let agent = Agent::start();
    let mut client = agent.client();
    let path = agent.path("f");
    let headers = [
        ("content-type", "application/octet-stream"),
        ("x-metadata-author", "me"),
    ];
    let target = format!("/files?path={path}");
    let answer = client.request("POST", &target, &headers, b"x").unwrap();
    if !String::from_utf8_lossy(&answer.body).contains("metadata") {
        println!("skipped: needs extended attributes");
        return;
    }
    let wanted = [("author".to_owned(), "me".to_owned())].into();
    assert_eq!(stat(&mut client, &path).unwrap().metadata, wanted);
    let moved = rename(&mut client, &path, &agent.path("g")).unwrap();
    assert_eq!(moved.metadata, wanted);
    let listed = list(&mut client, &agent.path(""), 1).unwrap();
    let listed = listed.iter().find(|entry| entry.name == "g").unwrap();
    assert_eq!(listed.metadata, wanted);
    client.write_file(&agent.path("g"), b"", None).unwrap();
    assert!(
        stat(&mut client, &agent.path("g"))
            .unwrap()
            .metadata
            .is_empty()
    );
}

#[test]
fn directories_are_listed_to_a_depth() {
    let agent = Agent::start();
    let mut client = agent.client();
    let root = agent.path("root");
    fs::create_dir_all(format!("{root}/b/c")).unwrap();
    for file in ["a", "b/x", "b/c/y"] {
        fs::write(format!("{root}/{file}"), "").unwrap();
    }
    symlink("b", format!("{root}/to-b")).unwrap();
    symlink(&root, agent.path("to-root")).unwrap();
    let mut paths = |path: &str, depth| -> Vec<String> {
        let entries = list(&mut client, path, depth).unwrap();
        let paths = entries.iter().map(|e| e.path.strip_prefix(path).unwrap());
        paths
            .map(|path| path.trim_start_matches('/').to_owned())
            .collect()
    };
    assert_eq!(paths(&root, 0), ["a", "b", "to-b"]);
    assert_eq!(paths(&root, 1), ["a", "b", "to-b"]);
    assert_eq!(paths(&root, 2), ["a", "b", "b/c", "b/x", "to-b"]);
    let all = ["a", "b", "b/c", "b/c/y", "b/x", "to-b"];
    assert_eq!(paths(&root, 9), all);
    // Through a link: entries keep the requested path.
    assert_eq!(paths(&agent.path("to-root"), 9), all);
    assert_eq!(paths(&format!("{root}/b/c"), 1), ["y"]);
    symlink("cycle", agent.path("cycle")).unwrap();
    let mut refused = |path: &str| code(list(&mut client, path, 1));
    assert_eq!(refused(&agent.path("none")), is(404, "not_found"));
    assert_eq!(refused(&format!("{root}/a")), is(400, "invalid_argument"));
    assert_eq!(
        refused(&agent.path("cycle")),
        is(400, "failed_precondition")
    );
    fs::create_dir(agent.path("empty")).unwrap();
    assert_eq!(list(&mut client, &agent.path("empty"), 1).unwrap(), []);
}

#[test]
fn large_listings_are_refused_without_delaying_others() {
    let agent = Agent::start();
    let mut client = agent.client();
    let name = "n".repeat(200);
    let mut root = agent.dir.path().join("root");
    let top = root.clone();
    root.extend([&name; 8]);
    // More than 24 MiB of names and paths.
    for dir in 0..8 {
        let dir = root.join(dir.to_string());
        fs::create_dir_all(&dir).unwrap();
        for file in 0..1500 {
            fs::write(dir.join(format!("{name}{file}")), "").unwrap();
        }
    }
    let root = root.to_str().unwrap();
    let (status, code) = code(list(&mut client, root, 2));
    assert_eq!((status, code.as_str()), (400, "invalid_argument"));
    assert_eq!(
        list(&mut client, &format!("{root}/3"), 1).unwrap().len(),
        1500
    );
    assert!(agent.peak_kib() < 64 << 10, "{} KiB", agent.peak_kib());
    let _: Empty = on_path(&mut client, "Remove", top.to_str().unwrap()).unwrap();
    assert!(!top.exists());
}

#[test]
fn directories_are_created_with_their_parents() {
    let agent = Agent::start();
    let mut client = agent.client();
    let path = agent.path("x/y/z");
    let made: EntryResponse = on_path(&mut client, "MakeDir", &path).unwrap();
    let made = made.entry.unwrap();
    assert_eq!((made.kind, made.mode), (FileType::Directory, 0o755));
    assert_eq!(made.path, path);
    let mut again = |path: &str| code(on_path::<EntryResponse>(&mut client, "MakeDir", path));
    assert_eq!(again(&path), is(409, "already_exists"));
    fs::write(agent.path("f"), "").unwrap();
    assert_eq!(again(&agent.path("f")), is(400, "invalid_argument"));
    assert_eq!(again(&agent.path("f/below")), is(400, "invalid_argument"));
}

#[test]
fn entries_are_moved() {
    let agent = Agent::start();
    let mut client = agent.client();
    let (from, to) = (agent.path("from"), agent.path("new/to"));
    fs::write(&from, "1").unwrap();
    let moved = rename(&mut client, &from, &to).unwrap();
    assert_eq!(
        (moved.path.as_str(), moved.name.as_str()),
        (to.as_str(), "to")
    );
    assert!(!Path::new(&from).exists());
    // An existing file at the destination is replaced, a directory is not.
    fs::write(&from, "2").unwrap();
    rename(&mut client, &from, &to).unwrap();
    assert_eq!(fs::read(&to).unwrap(), b"2");
    assert_eq!(
        code(rename(&mut client, &to, &agent.path("new"))),
        is(409, "already_exists")
    );
    // A missing source creates no parents of the destination.
    let far = agent.path("far/away");
    assert_eq!(code(rename(&mut client, &from, &far)), is(404, "not_found"));
    assert!(!Path::new(&agent.path("far")).exists());
    assert_eq!(
        code(rename(&mut client, "", &far)),
        is(400, "invalid_argument")
    );
    // Directories and links move unchanged.
    symlink("/nowhere", agent.path("link")).unwrap();
    let moved = rename(&mut client, &agent.path("link"), &agent.path("new/link")).unwrap();
    assert!(moved.symlink_target.is_some());
    rename(&mut client, &agent.path("new"), &agent.path("old")).unwrap();
    assert_eq!(fs::read(agent.path("old/to")).unwrap(), b"2");
}

#[test]
fn trees_are_removed_completely() {
    let agent = Agent::start();
    let mut client = agent.client();
    let mut remove = |path: &str| on_path::<Empty>(&mut client, "Remove", path);
    let outside = agent.path("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(format!("{outside}/kept"), "").unwrap();
    let tree = agent.path("tree");
    for dir in 0..30 {
        let dir = format!("{tree}/{dir}/deeper/and/deeper");
        fs::create_dir_all(&dir).unwrap();
        symlink(&outside, format!("{dir}/link")).unwrap();
        fs::write(format!("{dir}/file"), "").unwrap();
    }
    // More entries in one directory than one read returns.
    for file in 0..700 {
        fs::write(format!("{tree}/file-{file}"), "").unwrap();
    }
    symlink(&outside, agent.path("link")).unwrap();
    for path in [
        tree,
        agent.path("link"),
        agent.path("none"),
        agent.path("none/none"),
    ] {
        remove(&path).unwrap();
        assert!(fs::symlink_metadata(&path).is_err());
        // Again: removing a missing path is not an error.
        remove(&path).unwrap();
    }
    assert!(Path::new(&outside).join("kept").exists());
    remove(&format!("{outside}/kept")).unwrap();
    remove(&outside).unwrap();
    for nothing in ["", "/", "/tmp/.."] {
        assert_eq!(
            code(remove(nothing)),
            is(400, "invalid_argument"),
            "{nothing}"
        );
    }
    // Deeper than the limit of open directories.
    let mut deep = Path::new(&agent.path("deep")).to_owned();
    let top = deep.clone();
    for _ in 0..600 {
        deep.push("d");
    }
    fs::create_dir_all(&deep).unwrap();
    assert_eq!(code(remove(top.to_str().unwrap())), is(500, "internal"));
}

#[test]
fn long_work_does_not_delay_other_requests() {
    let agent = Agent::start();
    let tree = agent.path("tree");
    fs::create_dir(&tree).unwrap();
    for file in 0..20_000 {
        fs::write(format!("{tree}/{file}"), "").unwrap();
    }
    std::thread::scope(|scope| {
        let mut client = agent.client();
        let path = tree.clone();
        let removal = scope.spawn(move || on_path::<Empty>(&mut client, "Remove", &path).unwrap());
        agent::until("the beginning", || {
            let left = fs::read_dir(&tree).map_or(0, Iterator::count);
            (left < 20_000).then_some(())
        });
        let mut client = agent.client();
        client.health().unwrap();
        assert!(!removal.is_finished(), "answered only after the end");
    });
    assert!(!Path::new(&tree).exists());
}

#[test]
fn created_entries_belong_to_the_user() {
    let agent = Agent::start();
    let mut client = agent.client();
    let mut call = |method: &str, body: &str, user: &str| {
        let mut basic = b"Basic ".to_vec();
        envd::Blob::encode_into(format!("{user}:").as_bytes(), &mut basic);
        let basic = String::from_utf8(basic).unwrap();
        let headers = [
            ("content-type", "application/json"),
            ("authorization", basic.as_str()),
        ];
        let target = format!("/filesystem.Filesystem/{method}");
        client
            .request("POST", &target, &headers, body.as_bytes())
            .unwrap()
    };
    for method in ["Stat", "ListDir", "MakeDir", "Remove"] {
        let answer = call(method, r#"{"path":"x"}"#, "nobody-here");
        let text = String::from_utf8(answer.body).unwrap();
        assert_eq!(answer.status, 401);
        assert_eq!(
            text,
            r#"{"code":"unauthenticated","message":"invalid username: 'nobody-here'"}"#
        );
    }
    if !is_root() {
        return;
    }
    let made = format!(r#"{{"path":"{}"}}"#, agent.path("p/q"));
    assert_eq!(call("MakeDir", &made, "daemon").status, 200);
    fs::write(agent.path("f"), "").unwrap();
    let moved = format!(
        r#"{{"source":"{}","destination":"{}"}}"#,
        agent.path("f"),
        agent.path("r/s/f")
    );
    assert_eq!(call("Move", &moved, "daemon").status, 200);
    for (path, uid) in [("p", 1), ("p/q", 1), ("r", 1), ("r/s", 1), ("r/s/f", 0)] {
        let found = fs::metadata(agent.path(path)).unwrap();
        assert_eq!((found.uid(), found.gid()), (uid, uid), "{path}");
    }
}

#[test]
fn malformed_calls_are_refused() {
    let agent = Agent::start();
    let mut client = agent.client();
    let mut post = |method: &str, kind: &str, body: &str| {
        let headers = [("content-type", kind)];
        let target = format!("/filesystem.Filesystem/{method}");
        let answer = client.request("POST", &target, &headers, body.as_bytes());
        answer.unwrap().status
    };
    let json = "application/json";
    assert_eq!(post("Stat", json, "nonsense"), 400);
    assert_eq!(post("Stat", json, ""), 400);
    assert_eq!(post("Stat", "text/plain", "{}"), 415);
    assert_eq!(post("Chmod", json, "{}"), 501);
    assert_eq!(post("ListDir", json, r#"{"path":"/","depth":-1}"#), 400);
    // An empty path is the default working directory.
    assert_eq!(post("Stat", json, r#"{"unknown":1}"#), 200);
}
