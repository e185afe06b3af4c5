//! `GET` and `POST /files` beyond whole raw files: forms, gzip, ranges, signed links, metadata, full disks.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod agent;

use std::{
    fs,
    io::{Read, Write},
    os::unix::fs::MetadataExt,
    path::Path,
    process::Command,
    time::{SystemTime, UNIX_EPOCH},
};

use agent::{Agent, init, is_root};
use envd::{Blob, EnvdClient, ErrorBody, HttpAnswer, WriteInfo};
use flate2::{Compression, read::GzDecoder, write::GzEncoder};
use sha2::{Digest, Sha256};

const FORM: &str = "multipart/form-data; boundary=a-boundary";
const RAW: (&str, &str) = ("content-type", "application/octet-stream");

/// A form as the Python SDK sends it: every part has the field name `file`, and the file's path as its file name.
fn form(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut body = Vec::new();
    for (path, bytes) in files {
        let head = format!(
            "--a-boundary\r\nContent-Disposition: form-data; name=\"file\"; filename=\"{path}\"\r\n\
             Content-Type: application/octet-stream\r\n\r\n"
        );
        body.extend_from_slice(head.as_bytes());
        body.extend_from_slice(bytes);
        body.extend_from_slice(b"\r\n");
    }
    body.extend_from_slice(b"--a-boundary--\r\n");
    body
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn post(client: &mut EnvdClient, query: &str, headers: &[(&str, &str)], body: &[u8]) -> HttpAnswer {
    let target = format!("/files?{query}");
    client.request("POST", &target, headers, body).unwrap()
}

fn get(client: &mut EnvdClient, path: &str, headers: &[(&str, &str)]) -> HttpAnswer {
    let target = format!("/files?path={path}");
    client.request("GET", &target, headers, b"").unwrap()
}

fn written(answer: &HttpAnswer) -> Vec<WriteInfo> {
    let text = String::from_utf8_lossy(&answer.body);
    assert_eq!(answer.status, 200, "{text}");
    serde_json::from_slice(&answer.body).unwrap()
}

/// Status and text of a refusal whose code is its status.
fn refused(answer: &HttpAnswer) -> (u16, String) {
    let body: ErrorBody = serde_json::from_slice(&answer.body).unwrap();
    assert_eq!(body.code, answer.status);
    assert_eq!(answer.header("content-type"), Some("application/json"));
    (answer.status, body.message)
}

#[test]
fn a_form_writes_files_to_the_paths_that_it_names() {
    let agent = Agent::start();
    let mut client = agent.client();
    let (a, b) = (agent.path("new dir/a"), agent.path("b"));
    // Larger than one read, and made of the characters of delimiters.
    let long = b"\r\n--a-boundar\r\n--a-boundary-no".repeat(20_000);
    let body = form(&[(&a, b"hello"), (&b, &long)]);
    let answer = post(&mut client, "", &[("content-type", FORM)], &body);
    let infos: Vec<_> = written(&answer)
        .into_iter()
        .map(|info| (info.path, info.name, info.kind))
        .collect();
    let info = |path: &str, name: &str| (path.to_owned(), name.to_owned(), "file".to_owned());
    assert_eq!(infos, [info(&a, "a"), info(&b, "b")]);
    assert_eq!(fs::read(&a).unwrap(), b"hello");
    assert_eq!(fs::read(&b).unwrap(), long);
    // A path in the query overrides the file names of a form; other fields are skipped.
    let c = agent.path("c");
    let other = b"--a-boundary\r\nContent-Disposition: form-data; name=\"note\"\r\n\r\nx\r\n";
    let body = [&other[..], &form(&[("ignored", b"one")])].concat();
    let answer = post(
        &mut client,
        &format!("path={c}"),
        &[("content-type", FORM)],
        &body,
    );
    assert_eq!(written(&answer).len(), 1);
    assert_eq!(fs::read(&c).unwrap(), b"one");
    let nothing = post(
        &mut client,
        "",
        &[("content-type", FORM)],
        b"--a-boundary--",
    );
    assert_eq!(written(&nothing), []);
    // Empty files. All requests use one connection.
    let answer = post(
        &mut client,
        "",
        &[("content-type", FORM)],
        &form(&[(&c, b"")]),
    );
    written(&answer);
    assert_eq!(fs::read(&c).unwrap(), b"");
    client.health().unwrap();
}

#[test]
fn malformed_forms_are_refused() {
    let agent = Agent::start();
    let a = agent.path("a");
    let twice = form(&[(&a, b"first"), (&a, b"second")]);
    let nameless = b"--a-boundary\r\nContent-Disposition: form-data; name=\"file\"\r\n\r\nx\r\n";
    let endless = [b"--a-boundary\r\n".to_vec(), vec![b'x'; 1 << 20]].concat();
    let cut = &twice[..twice.len() - 4];
    for (kind, body, text) in [
        (
            FORM,
            &twice[..],
            "you cannot upload multiple files to the same path",
        ),
        (FORM, &nameless[..], "neither a filename nor a path"),
        (FORM, &endless[..], "above 8 KiB"),
        (FORM, cut, "you cannot upload"),
        (FORM, &cut[..60], "ends before its closing boundary"),
        ("multipart/form-data", &twice[..], "needs a boundary"),
        ("text/plain", b"x", "unsupported content type: text/plain"),
        (
            "application/octet-stream",
            b"x",
            "path query parameter is required",
        ),
    ] {
        // A refusal may close the connection, because the rest of the body is not read.
        let answer = post(&mut agent.client(), "", &[("content-type", kind)], body);
        let (status, message) = refused(&answer);
        assert_eq!(status, 400, "{message}");
        assert!(message.contains(text), "{message}");
    }
    assert_eq!(fs::read(&a).unwrap(), b"first");
    assert!(agent.peak_kib() < 16 << 10, "{} KiB", agent.peak_kib());
}

#[test]
fn compressed_uploads_are_decompressed() {
    let agent = Agent::start();
    let mut client = agent.client();
    let path = agent.path("f");
    let query = format!("path={path}");
    let encoded = [RAW, ("content-encoding", "gzip")];
    for bytes in [b"hello".repeat(100_000), Vec::new()] {
        written(&post(&mut client, &query, &encoded, &gzip(&bytes)));
        assert_eq!(fs::read(&path).unwrap(), bytes);
    }
    // Several members are one stream (RFC 1952, 2.2).
    let members = [gzip(b"one "), gzip(b"two")].concat();
    written(&post(&mut client, &query, &encoded, &members));
    assert_eq!(fs::read(&path).unwrap(), b"one two");
    let body = gzip(&form(&[(&path, b"in a form")]));
    let headers = [("content-type", FORM), ("content-encoding", "gzip")];
    written(&post(&mut client, "", &headers, &body));
    assert_eq!(fs::read(&path).unwrap(), b"in a form");
    // A body that is not gzip leaves the file unchanged.
    let whole = gzip(b"something longer");
    for bad in [&b"no gzip"[..], b"", &whole[..whole.len() - 3]] {
        let (status, message) = refused(&post(&mut agent.client(), &query, &encoded, bad));
        assert_eq!(status, 400, "{message}");
        assert!(message.starts_with("error decompressing"), "{message}");
        if !bad.starts_with(&[0x1f, 0x8b]) {
            assert_eq!(fs::read(&path).unwrap(), b"in a form");
        }
    }
    let other = [RAW, ("content-encoding", "br")];
    let (status, message) = refused(&post(&mut agent.client(), &query, &other, b"x"));
    assert_eq!((status, message.contains("unsupported")), (400, true));
    // A body that unpacks to a thousand times its length is not held in memory.
    written(&post(
        &mut client,
        &query,
        &encoded,
        &gzip(&vec![0; 64 << 20]),
    ));
    assert_eq!(fs::metadata(&path).unwrap().len(), 64 << 20);
    assert!(agent.peak_kib() < 16 << 10, "{} KiB", agent.peak_kib());
}

#[test]
fn downloads_are_compressed_on_request() {
    let agent = Agent::start();
    let mut client = agent.client();
    let path = agent.path("f");
    let bytes = b"0123456789".repeat(1 << 20);
    fs::write(&path, &bytes).unwrap();
    let answer = get(&mut client, &path, &[("accept-encoding", "gzip")]);
    assert_eq!(answer.header("content-encoding"), Some("gzip"));
    assert_eq!(answer.header("vary"), Some("accept-encoding"));
    assert!(answer.body.len() < bytes.len() / 10);
    let mut unpacked = Vec::new();
    GzDecoder::new(&answer.body[..])
        .read_to_end(&mut unpacked)
        .unwrap();
    assert_eq!(unpacked, bytes);
    for (path, wanted) in [(agent.path("empty"), 0), ("/proc/version".to_owned(), 10)] {
        if wanted == 0 {
            fs::write(&path, "").unwrap();
        }
        let answer = get(&mut client, &path, &[("accept-encoding", "gzip")]);
        let mut unpacked = Vec::new();
        GzDecoder::new(&answer.body[..])
            .read_to_end(&mut unpacked)
            .unwrap();
        assert!(unpacked.len() >= wanted);
    }
    // The headers that HTTP libraries send by default do not select compression.
    let answer = get(
        &mut client,
        &path,
        &[("accept-encoding", "gzip, deflate, br")],
    );
    assert_eq!(answer.header("content-encoding"), None);
    assert_eq!(
        answer.header("content-length"),
        Some(bytes.len().to_string().as_str())
    );
    assert_eq!(
        answer.header("content-disposition"),
        Some("inline; filename=f")
    );
    let none = get(
        &mut client,
        &path,
        &[("accept-encoding", "identity;q=0, br")],
    );
    assert_eq!(refused(&none).0, 406);
    assert!(agent.peak_kib() < 16 << 10, "{} KiB", agent.peak_kib());
}

#[test]
fn ranges_of_files_are_sent() {
    let agent = Agent::start();
    let mut client = agent.client();
    let path = agent.path("f");
    fs::write(&path, b"0123456789").unwrap();
    for (range, body, content_range) in [
        ("bytes=2-4", &b"234"[..], "bytes 2-4/10"),
        ("bytes=8-99", b"89", "bytes 8-9/10"),
        ("bytes=-3", b"789", "bytes 7-9/10"),
        ("bytes=0-", b"0123456789", "bytes 0-9/10"),
    ] {
        // A range is never compressed.
        let headers = [("range", range), ("accept-encoding", "gzip")];
        let answer = get(&mut client, &path, &headers);
        assert_eq!(
            (answer.status, answer.body.as_slice()),
            (206, body),
            "{range}"
        );
        assert_eq!(answer.header("content-range"), Some(content_range));
        let length = body.len().to_string();
        assert_eq!(answer.header("content-length"), Some(length.as_str()));
    }
    let beyond = get(&mut client, &path, &[("range", "bytes=10-")]);
    assert_eq!(refused(&beyond).0, 416);
    assert_eq!(beyond.header("content-range"), Some("bytes */10"));
    for headers in [
        &[("range", "bytes=0-1,3-4")][..],
        &[("range", "bytes=2-4"), ("if-range", "\"version\"")],
    ] {
        let answer = get(&mut client, &path, headers);
        assert_eq!((answer.status, answer.body.len()), (200, 10));
        assert_eq!(answer.header("accept-ranges"), Some("bytes"));
    }
}

fn signature(text: &str) -> String {
    let mut encoded = Vec::new();
    Blob::encode_into(&Sha256::digest(text.as_bytes()), &mut encoded);
    let encoded = String::from_utf8(encoded).unwrap();
    let encoded = encoded.trim_end_matches('=').replace('+', "%2B");
    format!("v1_{}", encoded.replace('/', "%2F"))
}

#[test]
fn a_signed_link_allows_one_operation_on_one_file() {
    let agent = Agent::raw();
    let mut settings = init();
    settings.access_token = Some("secret".into());
    agent.client().init(&settings).unwrap();
    let mut client = agent.client();
    let path = agent.path("f");
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_secs();
    let link = |operation: &str, expiration: Option<u64>| {
        let text = format!("{path}:{operation}::secret");
        match expiration {
            None => format!("path={path}&signature={}", signature(&text)),
            Some(at) => {
                let signature = signature(&format!("{text}:{at}"));
                format!("path={path}&signature={signature}&signature_expiration={at}")
            }
        }
    };
    written(&post(&mut client, &link("write", None), &[RAW], b"signed"));
    let mut read = |query: &str| {
        let answer = client.request("GET", &format!("/files?{query}"), &[], b"");
        answer.unwrap()
    };
    assert_eq!(read(&link("read", Some(now + 600))).body, b"signed");
    let message = |answer: HttpAnswer| refused(&answer);
    let unauthorized = |text: &str| (401, text.to_owned());
    assert_eq!(
        message(read(&link("read", Some(now - 10)))),
        unauthorized("signature is already expired")
    );
    for query in [
        link("write", None),
        link("read", Some(now + 600)).replace("/f&", "/g&"),
        link("read", Some(now + 600)).replace("expiration=", "expiration=9"),
        link("read", None) + "&username=root",
    ] {
        assert_eq!(message(read(&query)), unauthorized("invalid signature"));
    }
    assert_eq!(
        message(read(&format!("path={path}"))),
        unauthorized("missing signature query parameter")
    );
    let mut client = agent.client();
    client.set_access_token(Some("other".into()));
    assert_eq!(
        refused(&get(&mut client, &path, &[])),
        unauthorized("access token present in header but does not match")
    );
    client.set_access_token(Some("secret".into()));
    assert_eq!(get(&mut client, &path, &[]).body, b"signed");
}

#[test]
fn metadata_stays_until_the_file_is_written_again() {
    let agent = Agent::start();
    let mut client = agent.client();
    let path = agent.path("f");
    let query = format!("path={path}");
    let with = [
        RAW,
        ("X-Metadata-Author", "me"),
        ("x-metadata-b", " spaced "),
    ];
    let answer = post(&mut client, &query, &with, b"1");
    let metadata = &written(&answer)[0].metadata;
    if metadata.is_empty() {
        println!("skipped: needs extended attributes");
        return;
    }
    let pairs: Vec<_> = metadata
        .iter()
        .map(|(k, v)| (k.as_str(), v.as_str()))
        .collect();
    assert_eq!(pairs, [("author", "me"), ("b", "spaced")]);
    let answer = post(&mut client, &query, &[RAW, ("x-metadata-c", "3")], b"2");
    assert_eq!(
        written(&answer)[0].metadata,
        [("c".to_owned(), "3".to_owned())].into()
    );
    let answer = post(&mut client, &query, &[RAW], b"3");
    assert!(!String::from_utf8_lossy(&answer.body).contains("metadata"));
    // Every file of a form gets the metadata.
    let other = agent.path("g");
    let headers = [("content-type", FORM), ("x-metadata-k", "v")];
    let answer = post(
        &mut client,
        "",
        &headers,
        &form(&[(&path, b"1"), (&other, b"2")]),
    );
    assert!(written(&answer).iter().all(|info| info.metadata.len() == 1));
    let large = "x".repeat(5000);
    for (key, value) in [("x-metadata-k", "ä"), ("x-metadata-k", large.as_str())] {
        let (status, message) = refused(&post(
            &mut agent.client(),
            &query,
            &[RAW, (key, value)],
            b"4",
        ));
        assert_eq!(status, 400);
        assert!(message.starts_with("invalid metadata: "), "{message}");
    }
    assert_eq!(fs::read(&path).unwrap(), b"1");
}

#[test]
fn paths_and_users_are_resolved_in_the_sandbox() {
    let agent = Agent::start();
    let mut client = agent.client();
    let passwd = fs::read_to_string("/etc/passwd").unwrap();
    let home = |name: &str| {
        let line = passwd.lines().find(|l| l.starts_with(&format!("{name}:")));
        line.unwrap().split(':').nth(5).unwrap().to_owned()
    };
    let daemon = home("daemon");
    for (path, user, status, text) in [
        (
            "~",
            "daemon",
            400,
            format!("path '{daemon}' is a directory"),
        ),
        (
            "no-such",
            "daemon",
            404,
            format!("path '{daemon}/no-such' does not exist"),
        ),
        (
            "~/no-such",
            "daemon",
            404,
            format!("path '{daemon}/no-such' does not exist"),
        ),
        (
            "~root",
            "daemon",
            400,
            "cannot expand user-specific home dir".into(),
        ),
        // The default working directory.
        ("", "daemon", 400, "path '/' is a directory".into()),
        (
            "/x",
            "nobody-here",
            401,
            "invalid username: 'nobody-here'".into(),
        ),
    ] {
        let target = format!("/files?path={path}&username={user}");
        let answer = client.request("GET", &target, &[], b"").unwrap();
        assert_eq!(refused(&answer), (status, text), "{path}");
    }
    let file = agent.path("file");
    fs::write(&file, "").unwrap();
    let below = post(
        &mut agent.client(),
        &format!("path={file}/below"),
        &[RAW],
        b"x",
    );
    assert_eq!(refused(&below).0, 400);
    let dir = post(&mut agent.client(), "path=/etc", &[RAW], b"x");
    assert_eq!(refused(&dir), (400, "path '/etc' is a directory".into()));
    if is_root() {
        let path = agent.path("p/q/f");
        let query = format!("path={path}&username=daemon");
        // The second time, the file already exists and belongs to another user.
        for _ in 0..2 {
            written(&post(&mut client, &query, &[RAW], b"x"));
            for made in [path.clone(), agent.path("p/q"), agent.path("p")] {
                let found = fs::metadata(&made).unwrap();
                assert_eq!((found.uid(), found.gid()), (1, 1), "{made}");
            }
            assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o644);
            std::os::unix::fs::chown(&path, Some(0), Some(0)).unwrap();
        }
    }
}

/// A small file system, unmounted at the end of the test.
struct Tmpfs<'a>(&'a Path);

impl<'a> Tmpfs<'a> {
    fn mount(path: &'a Path, options: &str) -> Option<Self> {
        fs::create_dir(path).unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", options, "none"]).arg(path);
        mount.status().unwrap().success().then_some(Self(path))
    }
}

impl Drop for Tmpfs<'_> {
    fn drop(&mut self) {
        Command::new("umount").arg("-l").arg(self.0).status().ok();
    }
}

#[test]
fn a_full_disk_is_reported() {
    if !is_root() {
        return;
    }
    let agent = Agent::start();
    let small = agent.dir.path().join("small");
    let Some(mounted) = Tmpfs::mount(&small, "size=256k,nr_inodes=4") else {
        println!("skipped: cannot mount");
        return;
    };
    let query = format!("path={}", mounted.0.join("f").display());
    let body = vec![b'x'; 600 << 10];
    let (status, message) = refused(&post(&mut agent.client(), &query, &[RAW], &body));
    assert_eq!(status, 507);
    assert!(
        message.contains("not enough disk space available"),
        "{message}"
    );
    // No more inodes.
    let mut last = 200;
    for n in 0..8 {
        let query = format!("path={}", mounted.0.join(n.to_string()).display());
        last = post(&mut agent.client(), &query, &[RAW], b"").status;
    }
    assert_eq!(last, 507);
    // Removing files makes room again.
    fs::remove_file(mounted.0.join("f")).unwrap();
    written(&post(&mut agent.client(), &query, &[RAW], b"small"));
}
