//! Secrets: stored encrypted, used in requests of sandboxes, and leaked nowhere.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    net::TcpStream,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    sync::{Arc, Mutex, OnceLock},
};

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use serde_json::{Value, json};

use crate::{
    names::upstream,
    outside::with_outside,
    process::{Sandbox, Server, until, variable},
};

/// The host name that [`upstream`] answers with the address of the origin.
pub(crate) const HOST: &str = "api.test";

/// The authority of the origin's certificate, and its configuration.
struct World {
    ca: String,
    config: Arc<ServerConfig>,
}

static WORLD: OnceLock<World> = OnceLock::new();
/// Expected value of `x-api-key` at the origin.
static EXPECTED: Mutex<String> = Mutex::new(String::new());

fn world() -> &'static World {
    WORLD.get_or_init(|| {
        let ca_key = KeyPair::generate().unwrap();
        let mut ca = CertificateParams::default();
        ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = ca.self_signed(&ca_key).unwrap().pem();
        let issuer = Issuer::new(ca, ca_key);
        let key = KeyPair::generate().unwrap();
        let leaf = CertificateParams::new(vec![HOST.to_owned()]).unwrap();
        let leaf = leaf.signed_by(&key, &issuer).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(
                vec![leaf.der().clone()],
                rustls::pki_types::PrivatePkcs8KeyDer::from(key.serialize_der()).into(),
            )
            .unwrap();
        World {
            ca: pem,
            config: Arc::new(config),
        }
    })
}

/// An origin that reports whether the request had the expected key, but never the key itself.
pub(crate) fn plain(stream: TcpStream) {
    let writing = stream.try_clone().unwrap();
    answer(stream, writing);
}

/// The same over TLS.
pub(crate) fn tls(stream: TcpStream) {
    let session = ServerConnection::new(Arc::clone(&world().config)).unwrap();
    let mut stream = StreamOwned::new(session, stream);
    let Some(answer) = judge(&mut BufReader::new(&mut stream)) else {
        return;
    };
    // The client may have disconnected.
    let _ = stream.write_all(answer.as_bytes());
    let _ = stream.flush();
}

fn answer(stream: TcpStream, mut writing: TcpStream) {
    if let Some(answer) = judge(&mut BufReader::new(stream)) {
        let _ = writing.write_all(answer.as_bytes());
    }
}

fn judge(reading: &mut impl BufRead) -> Option<String> {
    let mut keys = Vec::new();
    for line in reading.lines() {
        let line = line.ok()?;
        if line.is_empty() {
            let expected = EXPECTED.lock().unwrap().clone();
            let said = if keys == [expected] {
                "expected"
            } else if keys.is_empty() {
                "absent"
            } else {
                "other"
            };
            let length = said.len();
            return Some(format!(
                "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{said}"
            ));
        }
        let (name, value) = line.split_once(':').unwrap_or_default();
        if name.eq_ignore_ascii_case("x-api-key") {
            keys.push(value.trim().to_owned());
        }
    }
    None
}

/// A server whose proxy trusts the origin's authority.
pub(crate) fn server(dir: &Path, options: &[&str]) -> Server {
    let (ca, script) = (dir.join("ca.pem"), dir.join("cube-api"));
    fs::write(&ca, &world().ca).unwrap();
    let program = env!("CARGO_BIN_EXE_cube-api");
    let text = format!(
        "#!/bin/sh\nSSL_CERT_FILE={} exec {program} \"$@\"\n",
        ca.display()
    );
    fs::write(&script, text).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o700)).unwrap();
    let proxy = variable("CUBE_BIN").unwrap().join("cube-egress");
    let (upstream, proxy) = (upstream(), proxy.to_str().unwrap().to_owned());
    let common = [
        "--insecure-loopback",
        "--warm",
        "0:1",
        "--uplink",
        "up0",
        "--dns-server",
        &upstream,
        "--egress-proxy",
        &proxy,
    ];
    Server::of_program(script, &[&common[..], options].concat())
}

/// Stores this value as the secret `key`, which the origin expects from now on.
pub(crate) fn expect(server: &Server, value: &str) {
    let secret = json!({"name": "key", "value": value});
    server.post("/secrets", &secret).expect(201);
    *EXPECTED.lock().unwrap() = value.to_owned();
}

pub(crate) fn rules(secret: &str) -> Value {
    let headers = json!({"X-Api-Key": format!("${{e2b.secrets.{secret}}}")});
    json!({HOST: [{"transform": {"headers": headers}, "plain": true}]})
}

fn network(rules: &Value) -> Value {
    json!({"denyOut": ["0.0.0.0/0"], "allowOut": [HOST], "rules": rules})
}

/// Sends a request from the sandbox with its own key. Returns the status and the origin's text.
pub(crate) fn call(server: &Server, sandbox: &Sandbox, scheme: &str) -> String {
    const ASK: &str = r#"
import sys, urllib.error, urllib.request
request = urllib.request.Request(sys.argv[1], headers={"X-API-KEY": "of the guest"})
try:
    with urllib.request.urlopen(request, timeout=30) as answer:
        print(answer.status, answer.read().decode())
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode()[:200])
except Exception as error:
    print("failed", repr(error)[:300])
"#;
    server.write_file(sandbox, "/tmp/ask.py", ASK);
    let script = format!("python3 /tmp/ask.py '{scheme}://{HOST}/v1/messages?q=1'");
    server.sh(sandbox, &script).trim().to_owned()
}

/// A program in the guest that calls the origin again and again, with its own key and an address that it resolved once.
/// It continues while no server runs.
struct Caller {
    /// Lines before the server is killed.
    before: usize,
}

impl Caller {
    fn start(server: &Server, sandbox: &Sandbox) -> Self {
        let script = format!(
            "cd /tmp; rm -f said stop; address=$(getent ahostsv4 {HOST} | head -n 1 | cut -d ' ' -f 1); \
             (while [ ! -e stop ]; do \
             said=$(curl -sS --max-time 20 --resolve {HOST}:443:$address -H 'X-Api-Key: own' https://{HOST}/v1/x 2> errors); \
             echo \"$? $said\" >> said; done) > /dev/null 2>&1 &"
        );
        server.sh(sandbox, &script);
        let before = Self::wait(server, sandbox, 2);
        Self { before }
    }

    /// Waits for a number of successful calls, and returns how many calls were made.
    fn wait(server: &Server, sandbox: &Sandbox, calls: usize) -> usize {
        let said = || server.sh(sandbox, "cat /tmp/said 2> /dev/null || true");
        until("calls succeed", || {
            said().lines().filter(|line| *line == "0 expected").count() >= calls
        });
        said().lines().count()
    }

    /// No call has reached the origin without the rule's header. None has failed since connections are accepted again:
    /// those that came before the sandbox was adopted have waited.
    fn check(self, server: &Server, sandbox: &Sandbox) {
        /// curl's exit code if the connection is refused.
        const REFUSED: &str = "7 ";
        Self::wait(server, sandbox, self.before + 5);
        let said = server.sh(sandbox, "touch /tmp/stop; cat /tmp/said");
        let lines: Vec<&str> = said.lines().collect();
        // A proxy that loses its server during a request responds with its own error.
        let is_answered = |line: &&&str| line.starts_with("0 ") && !line.contains("cube-egress: ");
        let mut answered = lines.iter().filter(is_answered);
        assert!(answered.all(|line| *line == "0 expected"), "{said}");
        let failed = |lines: &[&str]| lines.iter().filter(|line| !is_answered(line)).count();
        if let Some(last) = lines.iter().rposition(|line| *line == REFUSED) {
            assert_eq!(failed(&lines[last + 1..]), 0, "{said}");
        }
        // The call in progress at the kill, and its successor in the queue of the previous listener.
        let refused = lines.iter().filter(|line| **line == REFUSED).count();
        assert!(failed(&lines) <= refused + 2, "{said}");
    }
}

/// Paths of files below a directory that contain a text, including memory images. grep skips the holes of layers.
pub(crate) fn found_below(dir: &Path, text: &str) -> Vec<PathBuf> {
    let mut grep = Command::new("grep");
    grep.args(["-rlaF", "--devices=skip", "-e", text]).arg(dir);
    let output = grep.output().unwrap();
    // 1: nothing was found. A file may be removed during the search (2), but not all of them.
    let names = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.code().is_some_and(|code| code < 3), "{names}");
    names.lines().map(PathBuf::from).collect()
}

/// Command lines and environments of the processes that the server has started, and the server's own.
fn processes_with(server: &Server, text: &str) -> usize {
    let parent = |pid: &str| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("PPid:"));
        line.and_then(|pid| pid.trim().parse::<u32>().ok())
    };
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let pids = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let ours =
        pids.filter(|pid| pid.parse() == Ok(server.pid()) || parent(pid) == Some(server.pid()));
    let texts = ours.flat_map(|pid| {
        ["cmdline", "environ"]
            .map(|file| fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default())
    });
    let shown = |bytes: &Vec<u8>| String::from_utf8_lossy(bytes).contains(text);
    texts.filter(shown).count()
}

pub(crate) fn kvm_secrets_are_kept_without_their_values_in_any_answer() {
    let mut server = Server::open();
    let value = "canary-of-the-routes";
    let made = json!({"name": "OpenAI", "value": value, "metadata": {"team": "a"}});
    let answer = server.post("/secrets", &made).expect(201);
    assert!(!answer.text().contains(value));
    let secret = answer.json();
    assert_eq!(
        (&secret["name"], &secret["currentVersion"]),
        (&json!("openai"), &json!(1))
    );
    server.post("/secrets", &made).expect(409);
    for wrong in [
        json!({"name": "a.b", "value": "v"}),
        json!({"name": "sec_a", "value": "v"}),
        json!({"name": "a", "value": ""}),
        json!({"name": "a", "value": "v".repeat(65_537)}),
        json!({"name": "a", "value": "v", "metadata": {"k": "v".repeat(1025)}}),
        json!({"name": "a"}),
    ] {
        server.post("/secrets", &wrong).expect(400);
    }
    for name in ["one", "two"] {
        server
            .post("/secrets", &json!({"name": name, "value": value}))
            .expect(201);
    }
    let id = secret["secretID"].as_str().unwrap();
    for reference in [id, "openai", "OPENAI"] {
        let update = json!({"value": format!("{value}-2")});
        let answer = server
            .post(&format!("/secrets/{reference}"), &update)
            .expect(200);
        assert_eq!(answer.json()["metadata"]["team"], "a");
        assert!(!answer.text().contains(value));
    }
    server.crash_and_restart();
    let info = server.get("/secrets/openai").expect(200);
    assert_eq!(info.json()["currentVersion"], 4);
    let (mut names, mut next) = (Vec::new(), String::new());
    loop {
        let page = server
            .get(&format!("/secrets?limit=1&nextToken={next}"))
            .expect(200);
        assert!(!page.text().contains(value));
        let list = page.json();
        names.extend(
            list.as_array()
                .unwrap()
                .iter()
                .map(|s| s["name"].as_str().unwrap().to_owned()),
        );
        match page.header("x-next-token") {
            Some(token) if !token.is_empty() => next = token.to_owned(),
            _ => break,
        }
    }
    names.sort();
    assert_eq!(names, ["one", "openai", "two"]);
    assert_eq!(
        found_below(server.state.path(), value),
        Vec::<PathBuf>::new()
    );
    server.delete("/secrets/openai").expect(204);
    server.delete("/secrets/openai").expect(404);
    server.get(&format!("/secrets/{id}")).expect(404);
    // Rules need the proxy, and a network.
    let options = json!({"network": {"denyOut": ["0.0.0.0/0"], "rules": {"a.test": [{"transform": {"headers": {"a": "${e2b.secrets.}"}}}]}}});
    let refused = server.ask(&options).expect(400).json();
    assert!(
        refused["message"]
            .as_str()
            .unwrap()
            .contains("${e2b.secrets.}"),
        "{refused}"
    );
}

pub(crate) fn kvm_a_wrong_key_of_the_secrets_is_an_error_at_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let key = |name: &str, digit: &str| {
        let path = dir.path().join(name);
        fs::write(&path, digit.repeat(64)).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (right, wrong) = (key("right", "a"), key("wrong", "b"));
    let options = ["--insecure-loopback", "--warm", "0:0", "--network", "none"];
    let mut server = Server::with(&[&options[..], &["--secrets-key", &right]].concat());
    server
        .post("/secrets", &json!({"name": "a", "value": "v"}))
        .expect(201);
    server.stop();
    let output = Command::new(env!("CARGO_BIN_EXE_cube-api"))
        .args(["serve", "--templates"])
        .arg(variable("CUBE_ARTIFACTS").unwrap().join("templates"))
        .args(["--listen", &server.address.to_string(), "--state"])
        .arg(server.state.path())
        .arg("--vmm")
        .arg(variable("CUBE_BIN").unwrap().join("cube-vmm"))
        .args(options)
        .args(["--secrets-key", &wrong])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && said.contains("--secrets-key"),
        "{said}"
    );
    server.restart();
    server.get("/secrets/a").expect(200);
}

pub(crate) fn kvm_a_secret_reaches_the_origin_and_nothing_else() {
    with_outside(|| {
        let dir = tempfile::tempdir().unwrap();
        let server = server(dir.path(), &["--egress-calls"]);
        let (first, second) = ("canary-7f3a-first-value", "canary-7f3a-second-value");
        server
            .post("/secrets", &json!({"name": "key", "value": first}))
            .expect(201);
        *EXPECTED.lock().unwrap() = first.to_owned();
        let sandbox = server.create(&json!({"network": network(&rules("KEY"))}));
        for scheme in ["http", "https"] {
            assert_eq!(call(&server, &sandbox, scheme), "200 expected", "{scheme}");
        }
        // The detail has the placeholder.
        let detail = server
            .get(&format!("/sandboxes/{}", sandbox.id))
            .expect(200);
        assert_eq!(detail.json()["network"]["rules"], rules("KEY"));
        // A rotation applies to the next request.
        server
            .post("/secrets/key", &json!({"value": second}))
            .expect(200);
        *EXPECTED.lock().unwrap() = second.to_owned();
        assert_eq!(call(&server, &sandbox, "https"), "200 expected");
        // Forks keep the rules.
        let forks = server.post(
            &format!("/sandboxes/{}/fork", sandbox.id),
            &json!({"count": 1, "timeout": 300}),
        );
        let forks = forks.expect(201).json();
        let fork = Sandbox::of(&forks[0]["sandbox"]);
        assert_eq!(call(&server, &fork, "https"), "200 expected");
        // The record.
        let events = format!("/sandboxes/{}/network/events", sandbox.id);
        until("the calls are recorded", || {
            let events = server.get(&events).expect(200).json();
            events.as_array().unwrap().len() >= 3
        });
        let recorded = server.get(&events).expect(200).json();
        let last = recorded.as_array().unwrap().last().unwrap();
        assert_eq!(last["name"], HOST);
        let request = &last["call"];
        assert_eq!(
            (
                &request["method"],
                &request["path"],
                &request["status"],
                &request["rule"],
                &request["secrets"]
            ),
            (
                &json!("GET"),
                &json!("/v1/messages"),
                &json!(200),
                &json!(HOST),
                &json!(["key"])
            )
        );
        // Without its secret, a request fails. A sandbox without rules sends its own key.
        let planted = "canary-7f3a-planted";
        server.write_file(&sandbox, "/root/planted", planted);
        server.sh(&sandbox, "sync");
        let id = &sandbox.id;
        server
            .post(&format!("/sandboxes/{id}/pause"), &json!({}))
            .expect(204);
        let mut found =
            [first, second, planted].map(|text| found_below(server.state.path(), text).len());
        found[2] = found[2].min(1);
        assert_eq!(found, [0, 0, 1], "memory, disk, records and logs");
        let environment = format!("{}", dir.path().join("ca.pem").display());
        assert!(
            processes_with(&server, &environment) > 0,
            "the scan finds nothing"
        );
        for text in [first, second] {
            assert_eq!(processes_with(&server, text), 0);
        }
        let resumed = server.post(&format!("/sandboxes/{id}/resume"), &json!({"timeout": 300}));
        resumed.expect(201);
        assert_eq!(call(&server, &sandbox, "https"), "200 expected");
        server.delete("/secrets/key").expect(204);
        let failed = call(&server, &sandbox, "https");
        assert!(
            failed.starts_with("502 ") && failed.contains("key"),
            "{failed}"
        );
        let path = format!("/sandboxes/{id}/network");
        let plain = json!({"denyOut": ["0.0.0.0/0"], "allowOut": [HOST]});
        server.put(&path, &plain).expect(204);
        assert_eq!(call(&server, &sandbox, "http"), "200 other");
        // Without `plain`, the key is not sent in clear text.
        let mut in_tls = rules("key");
        in_tls[HOST][0].as_object_mut().unwrap().remove("plain");
        server.put(&path, &network(&in_tls)).expect(204);
        let refused = call(&server, &sandbox, "http");
        assert!(
            refused.starts_with("426 ") && refused.contains("https://"),
            "{refused}"
        );
        // Restore the secret and the rule; the guest already trusts the CA.
        server
            .post("/secrets", &json!({"name": "key", "value": second}))
            .expect(201);
        server.put(&path, &network(&rules("key"))).expect(204);
        assert_eq!(call(&server, &sandbox, "http"), "200 expected");
        let log = server.state.path().join("egress-calls.jsonl");
        let lines = fs::read_to_string(log).unwrap();
        assert!(
            lines.lines().count() >= 6 && !lines.contains("canary"),
            "{lines}"
        );
    });
}

/// Clients in the image `base`, each with the key that the proxy adds and without an option that sets the authority.
pub(crate) fn kvm_clients_of_the_base_image_trust_the_authority_of_rules() {
    with_outside(|| {
        let dir = tempfile::tempdir().unwrap();
        let server = server(dir.path(), &[]);
        expect(&server, "canary-of-clients");
        let sandbox = server.create(&json!({"network": network(&rules("key"))}));
        let url = format!("https://{HOST}/v1/x");
        for client in [
            format!("curl -sS --max-time 30 -H 'X-Api-Key: own' {url}"),
            format!("node -e 'fetch(\"{url}\").then(async r => console.log(await r.text()))'"),
            format!("node -e 'require(\"https\").get(\"{url}\", r => r.pipe(process.stdout))'"),
            format!(
                "printf 'GET /v1/x HTTP/1.1\\r\\nHost: {HOST}\\r\\nConnection: close\\r\\n\\r\\n' | \
                     openssl s_client -quiet -verify_return_error -connect {HOST}:443 2>/dev/null | tail -n 1"
            ),
        ] {
            assert_eq!(server.sh(&sandbox, &client).trim(), "expected", "{client}");
        }
        // These expect other responses than the origin's: git finds no references in it, and pip reports what is
        // missing.
        for (client, said) in [
            (
                format!("git ls-remote {url} 2>&1 && echo answered"),
                "answered",
            ),
            (
                format!(
                    "pip download --no-deps --no-input --retries 0 --index-url {url} x 2>&1; true"
                ),
                "Content-Type",
            ),
        ] {
            let output = server.sh(&sandbox, &client);
            assert!(output.contains(said), "{client}: {output}");
        }
    });
}

/// Covers two of the JDK's clients, its tool for trust stores, and Python libraries with their own bundles.
pub(crate) fn interpreter_java_and_clients_of_python_trust_the_authority_of_rules() {
    const JAVA: &str = r#"
import java.net.*;
import java.net.http.*;
public class Ask {
    public static void main(String[] words) throws Exception {
        var uri = URI.create(words[0]);
        var request = HttpRequest.newBuilder(uri).header("X-Api-Key", "own").build();
        System.out.println(HttpClient.newHttpClient().send(request, HttpResponse.BodyHandlers.ofString()).body());
        System.out.println(new String(uri.toURL().openStream().readAllBytes()));
    }
}
"#;
    const PYTHON: &str = r#"
import asyncio, sys, aiohttp, httpx, requests
url = sys.argv[1]
print(requests.get(url).text)
print(httpx.get(url).text)
async def ask():
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return await answer.text()
print(asyncio.run(ask()))
"#;
    with_outside(|| {
        let dir = tempfile::tempdir().unwrap();
        let server = server(dir.path(), &[]);
        expect(&server, "canary-of-java");
        let options =
            json!({"templateID": "code-interpreter-v1", "network": network(&rules("key"))});
        let sandbox = server.create(&options);
        server.write_file(&sandbox, "/tmp/Ask.java", JAVA);
        server.write_file(&sandbox, "/tmp/ask.py", PYTHON);
        let url = format!("https://{HOST}/v1/x");
        let ask = |client: &str| server.sh(&sandbox, &format!("{client} 2>&1"));
        let java = format!("java /tmp/Ask.java {url}");
        assert_eq!(
            ask(&java).trim(),
            "expected
expected"
        );
        let python = format!("python3 /tmp/ask.py {url}");
        assert_eq!(
            ask(&python).trim(),
            "expected
expected
expected"
        );
        // The JDK's own tool reads the store, checks its hash, and finds the system's authorities next to this one.
        let list = ask("keytool -list -cacerts -storepass changeit");
        let aliases = |part: &str| list.lines().filter(|line| line.starts_with(part)).count();
        assert_eq!(aliases("cube-egress-"), 1, "{list}");
        assert!(aliases("debian:") > 50, "{list}");
        // Without rules, nothing has been changed.
        let plain = server.create(&json!({"templateID": "code-interpreter-v1"}));
        let list = server.sh(&plain, "keytool -list -cacerts -storepass changeit 2>&1");
        assert!(
            !list.contains("cube-egress-") && list.contains("debian:"),
            "{list}"
        );
    });
}

pub(crate) fn kvm_rules_that_are_added_later_need_no_restart_of_the_guest() {
    with_outside(|| {
        let dir = tempfile::tempdir().unwrap();
        let alerts = dir.path().join("alerts");
        let command = dir.path().join("alert");
        fs::write(
            &command,
            format!("#!/bin/sh\ncat >> {}\n", alerts.display()),
        )
        .unwrap();
        fs::set_permissions(&command, fs::Permissions::from_mode(0o700)).unwrap();
        let command = command.to_str().unwrap();
        let mut server = server(
            dir.path(),
            &["--alert-refusals", "1", "--alert-command", command],
        );
        server
            .post("/secrets", &json!({"name": "key", "value": "canary-later"}))
            .expect(201);
        *EXPECTED.lock().unwrap() = "canary-later".to_owned();
        let plain = json!({"denyOut": ["0.0.0.0/0"], "allowOut": [HOST]});
        let sandbox = server.create(&json!({"network": plain}));
        assert_eq!(call(&server, &sandbox, "http"), "200 other");
        let bundle = "sha256sum < /etc/ssl/certs/ca-certificates.crt; echo $SSL_CERT_FILE";
        let before = server.sh(&sandbox, bundle);
        assert!(before.ends_with("-\n\n"), "{before}");
        server
            .put(
                &format!("/sandboxes/{}/network", sandbox.id),
                &network(&rules("key")),
            )
            .expect(204);
        assert_ne!(server.sh(&sandbox, bundle), before);
        assert_eq!(call(&server, &sandbox, "https"), "200 expected");
        // The proxy is killed, and another one replaces it.
        let proxies = || {
            let entries = fs::read_dir("/proc").unwrap().flatten();
            let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
            let is_proxy = |pid: &u32| {
                let program = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
                let parent = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
                program.ends_with("cube-egress")
                    && parent.contains(&format!("PPid:\t{}\n", server.pid()))
            };
            pids.filter(is_proxy).collect::<Vec<_>>()
        };
        let killed = proxies();
        assert_eq!(killed.len(), 1);
        server.signal_to(killed[0], nix::sys::signal::Signal::SIGKILL);
        until("a new proxy", || {
            proxies().iter().any(|pid| *pid != killed[0])
        });
        assert_eq!(call(&server, &sandbox, "https"), "200 expected");
        // The server is killed too, and another one starts on the same state.
        let caller = Caller::start(&server, &sandbox);
        server.crash_and_restart();
        caller.check(&server, &sandbox);
        assert_eq!(call(&server, &sandbox, "https"), "200 expected");
        // A name that is not allowed is refused and reported.
        let refused = server.sh(
            &sandbox,
            "python3 -c 'import socket; socket.gethostbyname(\"other.test\")' 2>&1 || true",
        );
        assert!(!refused.is_empty());
        until("an alert", || {
            fs::read_to_string(&alerts).is_ok_and(|text| text.contains("other.test"))
        });
        assert!(fs::read_to_string(&alerts).unwrap().contains(&sandbox.id));
    });
}
