//! Builds from images by clients of a server.

use std::{fs, path::Path, time::Instant};

use base64::{Engine, prelude::BASE64_STANDARD};
use serde_json::{Value, json};

use crate::{
    archive::{file, image, pack},
    process::Server,
    registry::{Registry, with_password},
    world::{PATIENCE, variable},
};

/// Builds a template and returns the messages of its log. Fails if the build does.
fn build(server: &Server, name: &str, from: &str, command: &str) -> Vec<String> {
    let status = build_to_its_end(server, name, from, command);
    assert_eq!(status["status"], "ready", "{status}");
    messages(&status)
}

/// Builds a template and returns its last status.
fn build_to_its_end(server: &Server, name: &str, from: &str, command: &str) -> Value {
    let request = json!({"name": name, "memoryMB": 256});
    let of_root = "mkdir -p /usr/local/of/root; echo r > /usr/local/of/root/file; ln -s /etc/passwd /usr/local/of/link";
    let steps =
        json!([{"type": "RUN", "args": [of_root, "root"]}, {"type": "RUN", "args": [command]}]);
    requested(
        server,
        &request,
        &json!({"fromImage": from, "steps": steps}),
    )
}

/// Requests and starts a build, and returns its last status.
pub(crate) fn requested(server: &Server, request: &Value, start: &Value) -> Value {
    let build = Build::start(server, request, start);
    let begun = Instant::now();
    while build.goes_on() {
        assert!(begun.elapsed() < PATIENCE * 2, "{}", build.status());
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    build.status()
}

/// A build that was started.
pub(crate) struct Build<'a> {
    server: &'a Server,
    pub(crate) template: String,
    path: String,
}

impl<'a> Build<'a> {
    pub(crate) fn start(server: &'a Server, request: &Value, start: &Value) -> Self {
        let requested = server.post("/v3/templates", request).expect(202).json();
        let text = |key: &str| requested[key].as_str().unwrap().to_owned();
        let (template, build) = (text("templateID"), text("buildID"));
        let path = format!("/templates/{template}/builds/{build}");
        server.post(&format!("/v2{path}"), start).expect(202);
        Self {
            server,
            template,
            path,
        }
    }

    pub(crate) fn status(&self) -> Value {
        let path = format!("{}/status?logsOffset=0&limit=100", self.path);
        self.server.get(&path).expect(200).json()
    }

    pub(crate) fn goes_on(&self) -> bool {
        let status = self.status();
        // Waiting: queued, until an earlier build has ended.
        status["status"] == "waiting" || status["status"] == "building"
    }
}

fn messages(status: &Value) -> Vec<String> {
    let entries = status["logEntries"].as_array().unwrap().iter();
    let messages = entries.map(|entry| entry["message"].as_str().unwrap().to_owned());
    messages.collect()
}

/// Starts a server that pulls from this registry over http.
fn serve(registry: &Registry, more: &[&str]) -> Server {
    let (address, converter) = (registry.address, variable("CUBE_BIN").join("cube-image"));
    let mirror = format!("{address}=http://{address}");
    let mut options = vec!["--insecure-loopback", "--warm", "0:0"];
    options.extend(["--image-mirror", &mirror]);
    options.extend(["--image-converter", converter.to_str().unwrap()]);
    options.extend(more);
    Server::with(&options)
}

pub(crate) fn kvm_a_template_is_built_from_an_image_by_a_client() {
    let storage = tempfile::tempdir().unwrap();
    let registry = Registry::start(storage.path(), "");
    registry.push(&image(&[pack(&[file("a", "1")])]));
    let address = registry.address;
    let server = serve(&registry, &[]);
    let from = format!("{address}/r");
    let log = build(&server, "mine", &from, "echo $A > /home/user/made");
    assert!(
        log[0].starts_with(&format!("[base] FROM {from} [")),
        "{log:?}"
    );
    let sandbox = server.create(&json!({"templateID": "mine"}));
    let script = "cat /home/user/made /a; echo \"[$A]\"; id -un";
    assert_eq!(server.sh(&sandbox, script).trim_end(), "b\n1[]\nuser");
    // Files that steps of root have put there are writable as well; links are not followed.
    let script = "cd /usr/local; echo u >> of/root/file; touch new; stat -c %a of/root of/root/file /etc/passwd";
    assert_eq!(server.sh(&sandbox, script), "777\n777\n644\n");
    // The next server finds the image's template.
    server.reload().unwrap();
    let log = build(&server, "other", &from, "echo $A > /home/user/other");
    assert!(log[0].starts_with("CACHED [base] FROM"), "{log:?}");
    build(
        &server,
        "default",
        "e2bdev/base",
        "python3 -c 'print(1)' > /home/user/made",
    );
    let sandbox = server.create(&json!({"templateID": "default"}));
    assert_eq!(server.sh(&sandbox, "cat /home/user/made").trim_end(), "1");
}

/// Writes Docker's config.json with this login for a registry.
fn docker_config(path: &Path, registry: &Registry, login: &str) {
    let auth = BASE64_STANDARD.encode(login);
    let config = json!({"auths": {registry.address.to_string(): {"auth": auth}}});
    fs::write(path, config.to_string()).unwrap();
}

pub(crate) fn kvm_credentials_of_the_operator_open_a_registry_to_builds_without_their_own() {
    let storage = tempfile::tempdir().unwrap();
    let registry = with_password(storage.path(), &image(&[pack(&[file("a", "1")])]));
    let config = storage.path().join("config.json");
    docker_config(&config, &registry, "user:wrong");
    let mut server = serve(
        &registry,
        &["--image-credentials", config.to_str().unwrap()],
    );
    let from = format!("{}/r", registry.address);
    let refused = build_to_its_end(&server, "mine", &from, "true");
    let reason = refused["reason"]["message"].as_str().unwrap();
    assert!(reason.contains("denies access"), "{reason}");
    assert!(!refused.to_string().contains("wrong"), "{refused}");
    // A server reads the file when it starts.
    docker_config(&config, &registry, "user:secret");
    server.stop();
    server.restart();
    build(&server, "mine", &from, "cat /a > /home/user/made");
    let sandbox = server.create(&json!({"templateID": "mine"}));
    assert_eq!(server.sh(&sandbox, "cat /home/user/made"), "1");
    // A build's own credentials come before the operator's.
    let request = json!({"name": "own", "memoryMB": 256});
    let registry_of_build = json!({"type": "registry", "username": "user", "password": "other"});
    let start = json!({"fromImage": from, "fromImageRegistry": registry_of_build, "steps": []});
    let refused = requested(&server, &request, &start);
    assert_eq!(refused["status"], "error", "{refused}");
    assert!(!refused.to_string().contains("other"), "{refused}");
}
