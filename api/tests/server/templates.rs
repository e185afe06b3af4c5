//! Builds of templates that run: steps, cache, start command, failures and cancellations.

mod copies;
mod room;

pub(crate) use copies::kvm_a_recipe_that_is_known_by_another_name_needs_no_machine;
pub(crate) use room::{
    kvm_a_template_has_the_free_disk_that_its_build_asks_for,
    kvm_a_template_is_not_promised_more_disk_than_its_sandboxes_may_write,
};

use std::{
    fs,
    path::PathBuf,
    process::Command,
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::{
    http,
    process::{Server, until},
};

/// Time limit of a build: a busy host delays the boots of its VMs.
const PATIENCE: Duration = Duration::from_secs(240);

/// A build that was started.
pub(crate) struct Build<'a> {
    server: &'a Server,
    pub(crate) template: String,
    pub(crate) path: String,
}

/// How a build ended.
pub(crate) struct Outcome {
    status: Value,
    pub(crate) log: Vec<String>,
}

pub(crate) fn request<'a>(server: &'a Server, name: &str, memory_mb: u64) -> Build<'a> {
    let body = json!({"name": name, "cpuCount": 2, "memoryMB": memory_mb});
    let answer = server.post("/v3/templates", &body);
    Build::of(server, &answer.expect(202).json())
}

/// Starts a build of `base` with these options.
pub(crate) fn start<'a>(server: &'a Server, name: &str, options: &Value) -> Build<'a> {
    request(server, name, 256).start(options)
}

pub(crate) fn run(command: &str) -> Value {
    json!({"type": "RUN", "args": [command]})
}

pub(crate) fn step(kind: &str, args: &[&str]) -> Value {
    json!({"type": kind, "args": args})
}

impl<'a> Build<'a> {
    /// The build in a response.
    pub(crate) fn of(server: &'a Server, answer: &Value) -> Self {
        let text = |key: &str| answer[key].as_str().unwrap().to_owned();
        let (template, build) = (text("templateID"), text("buildID"));
        let path = format!("/templates/{template}/builds/{build}");
        Self {
            server,
            template,
            path,
        }
    }

    pub(crate) fn start(self, options: &Value) -> Self {
        let mut body = json!({"fromTemplate": "base", "steps": []});
        for (key, value) in options.as_object().unwrap() {
            body[key] = value.clone();
        }
        let answer = self.server.post(&format!("/v2{}", self.path), &body);
        answer.expect(202);
        self
    }

    fn status(&self, offset: usize) -> Value {
        let path = format!("{}/status?logsOffset={offset}", self.path);
        self.server.get(&path).expect(200).json()
    }

    /// Follows the build as the SDKs do, until its last log entry.
    fn end(&self) -> Outcome {
        let (begun, mut log) = (Instant::now(), Vec::new());
        loop {
            let status = self.status(log.len());
            let entries = status["logEntries"].as_array().unwrap();
            let texts = entries.iter().map(|entry| {
                let text = |key: &str| entry[key].as_str().unwrap_or_default().to_owned();
                format!("{} {}", text("step"), text("message"))
            });
            log.extend(texts);
            let is_over = status["status"] == "ready" || status["status"] == "error";
            if is_over && entries.is_empty() {
                return Outcome { status, log };
            }
            assert!(begun.elapsed() < PATIENCE, "{status} {log:#?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub(crate) fn is_ready(&self) -> Outcome {
        let outcome = self.end();
        let (status, log) = (&outcome.status, &outcome.log);
        assert_eq!(status["status"], "ready", "{status} {log:#?}");
        outcome
    }

    /// The reason of the failure, and the step that it names.
    pub(crate) fn fails(&self) -> (String, String) {
        let outcome = self.end();
        let (status, log) = (&outcome.status, &outcome.log);
        assert_eq!(status["status"], "error", "{status} {log:#?}");
        let reason = &status["reason"];
        let text = |key: &str| reason[key].as_str().unwrap_or_default().to_owned();
        (text("step"), text("message"))
    }

    /// Waits for a line of the log.
    fn logs(&self, text: &str) {
        let begun = Instant::now();
        while !self.status(0).to_string().contains(text) {
            assert!(begun.elapsed() < PATIENCE, "{text}: {}", self.status(0));
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Uploads an archive of files, given as pairs of a path and a text, and returns its hash.
    pub(crate) fn upload(&self, digit: &str, files: &[(&str, &str)], options: &[&str]) -> String {
        let dir = tempfile::tempdir().unwrap();
        let context = dir.path().join("context");
        for (path, text) in files {
            let path = context.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let archive = dir.path().join("archive");
        let mut tar = Command::new("tar");
        tar.args(options).arg("-cf").arg(&archive).arg("-C");
        assert!(tar.arg(&context).arg(".").status().unwrap().success());
        let hash = digit.repeat(32);
        let path = format!("/templates/{}/files/{hash}", self.template);
        let grant = self.server.get(&path).expect(201).json();
        let url = grant["url"].as_str().unwrap();
        let target = &url[url.find("/templates/").unwrap()..];
        let bytes = fs::read(archive).unwrap();
        http::send(self.server.address, "PUT", target, &[], &bytes).expect(200);
        hash
    }
}

impl Outcome {
    fn has(&self, text: &str) -> bool {
        self.log.iter().any(|line| line.contains(text))
    }

    pub(crate) fn count(&self, text: &str) -> usize {
        self.log.iter().filter(|line| line.contains(text)).count()
    }
}

fn below(server: &Server, dir: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(server.state.path().join(dir)).unwrap();
    entries.map(|entry| entry.unwrap().path()).collect()
}

/// Waits until no build VM is left, and exactly `templates` templates remain in the pool.
fn leaves(server: &Server, templates: usize) {
    until("the machines are gone", || {
        below(server, "sandboxes").is_empty()
    });
    until("only the needed templates are left", || {
        below(server, "templates").len() == templates
    });
}

pub(crate) fn kvm_a_template_is_built_of_its_steps_and_its_sandboxes_begin_there() {
    let server = Server::open();
    let build = request(&server, "mine:v1", 256);
    let files = [
        ("app/a.txt", "a"),
        ("app/b.txt", "b"),
        ("app/c.md", "c"),
        ("tool", "#!/bin/sh"),
    ];
    let hash = build.upload("0a", &files, &["-z"]);
    let copy = |args: &[&str]| json!({"type": "COPY", "args": args, "filesHash": hash});
    let steps = [
        step("ENV", &["A", "one", "B", "$HOME/two"]),
        step("WORKDIR", &["/srv/app"]),
        run("echo \"$A $B\" > env; pwd > where; whoami > who; echo out; echo err >&2"),
        json!({"type": "RUN", "args": ["id -u > /root/uid", "root"]}),
        step("ENV", &["PATH", "/opt/mine:$PATH"]),
        copy(&["app/*.txt", "texts/", "", ""]),
        copy(&["tool", "/usr/local/bin/tool", "root", "0755"]),
        step("USER", &["worker"]),
        step("WORKDIR", &["below"]),
        run("whoami > who; echo $PATH > path; cat ../env > env"),
    ];
    let build = build.start(&json!({"steps": steps}));
    let outcome = build.is_ready();
    for line in [
        "3 [builder 3/10] [stdout]: out",
        "3 [builder 3/10] [stderr]: err",
        "finalize Template is ready",
    ] {
        assert!(outcome.has(line), "{line}: {:#?}", outcome.log);
    }
    assert!(!outcome.has("CACHED"), "{:#?}", outcome.log);
    // Each step that changes the disk left a layer, and there is the template.
    leaves(&server, 10);

    let sandbox = server.create(&json!({"templateID": "mine:v1"}));
    let read = |path: &str| server.read_file(&sandbox, path);
    assert_eq!(read("/srv/app/env"), "one /root/two\n");
    assert_eq!(read("/srv/app/where"), "/srv/app\n");
    assert_eq!(
        (read("/srv/app/who"), read("/root/uid")),
        ("user\n".into(), "0\n".into())
    );
    let all = "cd /srv/app/texts; stat -c '%n %U' *; stat -c '%U %a' /usr/local/bin/tool";
    assert_eq!(
        server.sh(&sandbox, all),
        "a.txt user\nb.txt user\nc.md user\nroot 755\n"
    );
    assert_eq!(read("/srv/app/below/env"), "one /root/two\n");
    assert!(read("/srv/app/below/path").starts_with("/opt/mine:"));
    // User and directory at the end become the sandboxes' defaults; variables do not.
    let defaults = server.sh(&sandbox, "whoami; pwd; echo \"${A-none}\"");
    assert_eq!(defaults, "worker\n/srv/app/below\nnone\n");
    let detail = server.get(&format!("/templates/{}", build.template));
    let detail = detail.expect(200).json();
    let ready = &detail["builds"][0];
    assert_eq!(
        (&ready["memoryMB"], &ready["cpuCount"]),
        (&json!(256), &json!(1)),
        "the sizes of the guests"
    );
    server
        .delete(&format!("/templates/{}", build.template))
        .expect(204);
}

pub(crate) fn kvm_only_the_start_command_runs_on_in_sandboxes() {
    let server = Server::open();
    let daemon = "setsid sleep 7777 >/dev/null 2>&1 & echo left > /home/user/daemon";
    let build = start(
        &server,
        "served",
        &json!({
            "steps": [run(daemon), run("! pgrep -f 'sleep 777[7]'"), step("ENV", &["WORD", "hello"])],
            "startCmd": "echo $WORD > /tmp/word; echo begun; exec sleep 8888",
            "readyCmd": "[ -f /tmp/word ] && pgrep -f 'sleep 888[8]'",
        }),
    );
    let outcome = build.is_ready();
    assert!(
        outcome.has("finalize [start] [stdout]: begun"),
        "{:#?}",
        outcome.log
    );
    for _ in 0..2 {
        let sandbox = server.create(&json!({"templateID": "served"}));
        let seen = server.sh(
            &sandbox,
            "cat /tmp/word daemon; pgrep -fc 'sleep 888[8]'; pgrep -fc 'sleep 777[7]' || true",
        );
        assert_eq!(seen, "hello\nleft\n1\n0\n");
    }
    // Another template continues from it: settings and start command included.
    let child = start(
        &server,
        "child",
        &json!({"fromTemplate": "served", "steps": [run("echo $WORD > word")]}),
    );
    child.is_ready();
    let sandbox = server.create(&json!({"templateID": "child"}));
    let seen = server.sh(&sandbox, "cat word daemon; pgrep -fc 'sleep 888[8]'");
    assert_eq!(seen, "hello\nleft\n1\n");

    for (options, message) in [
        (
            json!({"startCmd": "echo bad; exit 3", "readyCmd": "false"}),
            "start command failed: error running start command: exit status 3",
        ),
        (
            json!({"startCmd": "sleep 100", "readyCmd": "no-such-program", "steps": [step("USER", &["root"])]}),
            "",
        ),
    ] {
        let build = start(&server, "bad", &options);
        if message.is_empty() {
            build.logs("Waiting for template to be ready: no-such-program");
            server
                .delete(&format!("/templates/{}", build.template))
                .expect(204);
            continue;
        }
        assert_eq!(build.fails(), ("finalize".to_owned(), message.to_owned()));
    }
}

pub(crate) fn kvm_a_failed_build_names_its_step_and_leaves_nothing() {
    let server = Server::open();
    let steps = |last: Value| json!({"steps": [step("ENV", &["A", "1"]), last]});
    let hash = "0c".repeat(32);
    for (options, at, message) in [
        (
            steps(run("echo no >&2; exit 7")),
            "2",
            "failed to run command 'echo no >&2; exit 7': exit status 7",
        ),
        (
            steps(json!({"type": "RUN", "args": ["true", "root123"]})),
            "2",
            "failed to run command 'true': command failed: unauthenticated: invalid username: 'root123'",
        ),
        (
            steps(step("ENV", &["A"])),
            "2",
            "ENV requires both a key and value arguments",
        ),
        (
            steps(step("COPY", &["a"])),
            "2",
            "COPY requires a local path and a container path argument",
        ),
        (
            steps(json!({"type": "COPY", "args": ["a", "b"], "filesHash": hash})),
            "2",
            "failed to open files object from storage: no files were uploaded for the hash",
        ),
        (
            json!({"fromTemplate": "no-such-template"}),
            "base",
            "template 'no-such-template' was not found",
        ),
    ] {
        let (step, found) = start(&server, "mine", &options).fails();
        assert!(found.starts_with(message), "{found}");
        assert_eq!(step, at, "{found}");
    }
    server
        .post("/v2/sandboxes", &json!({"templateID": "mine"}))
        .expect(404);
    // The disk with the first step's result is that of `base`.
    leaves(&server, 1);
}

pub(crate) fn kvm_steps_run_once_until_they_change_or_are_forced() {
    let mut server = Server::open();
    let steps = |last: &str| {
        json!([
            run("cat /proc/sys/kernel/random/uuid > /home/user/one"),
            run(last)
        ])
    };
    let one = |server: &Server| {
        let sandbox = server.create(&json!({"templateID": "mine"}));
        let text = server.read_file(&sandbox, "/home/user/one");
        server.delete(&sandbox.path("")).expect(204);
        text
    };
    let first = start(&server, "mine", &json!({"steps": steps("echo a > two")})).is_ready();
    assert_eq!(first.count("CACHED"), 0);
    let drawn = one(&server);
    let again = start(&server, "mine", &json!({"steps": steps("echo a > two")})).is_ready();
    assert_eq!(again.count("CACHED"), 3, "{:#?}", again.log);
    assert_eq!(one(&server), drawn);
    let other = start(&server, "other", &json!({"steps": steps("echo a > two")})).is_ready();
    assert_eq!(other.count("CACHED"), 3, "{:#?}", other.log);
    server.stop();
    server.restart();
    let changed = start(&server, "mine", &json!({"steps": steps("echo b > two")})).is_ready();
    assert_eq!(changed.count("CACHED"), 1, "{:#?}", changed.log);
    assert_eq!(one(&server), drawn);
    // A forced step runs together with all later ones. A forced build runs from its start.
    let mut forced = steps("echo b > two");
    forced[1]["force"] = true.into();
    let forced = start(&server, "mine", &json!({"steps": forced})).is_ready();
    assert_eq!(forced.count("CACHED"), 1, "{:#?}", forced.log);
    assert_eq!(one(&server), drawn);
    let options = json!({"steps": steps("echo b > two"), "force": true});
    let forced = start(&server, "mine", &options).is_ready();
    assert_eq!(forced.count("CACHED"), 0, "{:#?}", forced.log);
    let redrawn = one(&server);
    assert_ne!(redrawn, drawn);
    // Steps cached after the previous result no longer apply.
    let back = start(&server, "mine", &json!({"steps": steps("echo a > two")})).is_ready();
    assert_eq!(back.count("CACHED"), 1, "{:#?}", back.log);
    assert_eq!(one(&server), redrawn);
}

pub(crate) fn kvm_a_build_ends_when_it_is_superseded_deleted_or_its_server_is_killed() {
    let mut server = Server::open();
    let endless = json!({"steps": [run("echo endless; sleep infinity")]});
    let older = start(&server, "mine", &endless);
    older.logs("[stdout]: endless");
    let newer = start(&server, "mine", &endless);
    let superseded = "The build was canceled because it was superseded by a newer one.";
    assert_eq!(older.fails().1, superseded);
    newer.logs("[stdout]: endless");
    server
        .delete(&format!("/templates/{}", newer.template))
        .expect(204);
    leaves(&server, 0);

    let running = start(&server, "mine", &endless);
    running.logs("[stdout]: endless");
    // The sandbox of a build is not visible to clients.
    assert_eq!(server.list(), Vec::<String>::new());
    let path = running.path.clone();
    server.crash_and_restart();
    let status = || server.get(&format!("{path}/status")).expect(200).json();
    until("the new server ends the build", || {
        status()["status"] == "error"
    });
    assert_eq!(
        status()["reason"]["message"],
        "the server was stopped or restarted during the build: start the build again"
    );
    leaves(&server, 0);
    // Other builds continue in the meantime.
    start(&server, "mine", &json!({"steps": [run("true")]})).is_ready();
}

pub(crate) fn kvm_a_guest_without_disk_or_memory_or_vmm_ends_its_build_only() {
    let server = Server::with(&["--insecure-loopback", "--warm", "0:0", "--max-builds", "4"]);
    let other = start(
        &server,
        "other",
        &json!({"steps": [run("sleep 5; echo done > it")]}),
    );
    let full = start(
        &server,
        "full",
        &json!({"steps": [json!({"type": "RUN", "args": ["fallocate -l 100G /x || head -c 8G /dev/zero > /x", "root"]})]}),
    );
    let hungry = "python3 -c 'x = [bytes([1]) * (1 << 20) for _ in iter(int, 1)]'";
    let hungry = start(&server, "hungry", &json!({"steps": [run(hungry)]}));
    let killed = start(
        &server,
        "killed",
        &json!({"steps": [run("echo begun; sleep infinity")]}),
    );
    killed.logs("[stdout]: begun");
    let (at, message) = hungry.fails();
    assert!(
        at == "1" && message.contains("ran out of memory"),
        "{message}"
    );
    let (at, message) = full.fails();
    assert!(
        at == "1" && message.contains("disk of the build is full"),
        "{message}"
    );
    other.is_ready();
    for dir in below(&server, "sandboxes") {
        let record = fs::read(dir.join("record.json")).unwrap();
        let record: Value = serde_json::from_slice(&record).unwrap();
        let pid = u32::try_from(record["vmm"]["pid"].as_u64().unwrap()).unwrap();
        server.signal_to(pid, Signal::SIGKILL);
    }
    let (at, message) = killed.fails();
    assert!(at == "1" && message.contains("has ended"), "{message}");
    leaves(&server, 2);
    let sandbox = server.create(&json!({"templateID": "other"}));
    assert_eq!(server.read_file(&sandbox, "/home/user/it"), "done\n");
}

pub(crate) fn kvm_two_builds_of_one_name_with_different_tags_both_become_ready() {
    let server = Server::open();
    let builds = ["v1", "v2"].map(|tag| {
        let steps = [run("echo same > same"), run(&format!("echo {tag} > tag"))];
        start(&server, &format!("mine:{tag}"), &json!({"steps": steps}))
    });
    for build in &builds {
        build.is_ready();
    }
    for tag in ["v1", "v2"] {
        let sandbox = server.create(&json!({"templateID": format!("mine:{tag}")}));
        assert_eq!(
            server.sh(&sandbox, "cat same tag"),
            format!("same\n{tag}\n")
        );
    }
}
