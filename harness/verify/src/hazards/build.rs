//! Builds templates through the API, one of each kind, so that the suite can verify them.

use std::{
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::sandbox::{Account, SandboxError, decode, expect, failed};

/// Time limit of a build. The first one from an image converts that image.
const LIMIT: Duration = Duration::from_secs(600);
const POLL: Duration = Duration::from_millis(200);
/// MiB of RAM.
const MEMORY: u32 = 512;
/// Start command: a local server that responds to each request with a number from a generator seeded when the
/// program started.
const SERVER: &str = r#"exec python3 -c '
import http.server, random
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(repr(random.random()).encode())
http.server.HTTPServer(("127.0.0.1", 8765), Answer).serve_forever()'"#;
/// Requests a number from [`SERVER`].
const ASK: &str = r#"python3 -c '
import urllib.request
print(urllib.request.urlopen("http://127.0.0.1:8765").read().decode())'"#;

/// A kind of template to build.
pub(super) struct Kind {
    /// Name of the template.
    name: &'static str,
    start: Value,
    /// Command that requests a random value from the start command's process.
    pub(super) ask: Option<&'static str>,
}

/// The kinds, each with a step.
pub(super) fn kinds() -> [Kind; 3] {
    let steps = json!([{ "type": "RUN", "args": ["echo made > ~/made"] }]);
    [
        Kind {
            name: "clone-hazards-from-template",
            start: json!({ "fromTemplate": "base", "steps": steps }),
            ask: None,
        },
        Kind {
            name: "clone-hazards-from-image",
            start: json!({ "fromImage": "e2bdev/base", "steps": steps }),
            ask: None,
        },
        Kind {
            name: "clone-hazards-start-command",
            start: json!({
                "fromTemplate": "base",
                "steps": steps,
                "startCmd": SERVER,
                "readyCmd": ASK,
            }),
            ask: Some(ASK),
        },
    ]
}

/// A built template. Dropping it deletes it.
pub(super) struct Template<'a> {
    account: &'a Account,
    id: String,
    pub(super) name: String,
}

impl Drop for Template<'_> {
    fn drop(&mut self) {
        // A template that could not be deleted is replaced by the next run.
        let path = format!("/templates/{}", self.id);
        let _ = self.account.request("DELETE", &path, None);
    }
}

/// Builds a template, and waits until it is ready.
pub(super) fn build<'a>(account: &'a Account, kind: &Kind) -> Result<Template<'a>, SandboxError> {
    let action = format!("build the template {}", kind.name);
    let body = json!({ "name": kind.name, "cpuCount": 1, "memoryMB": MEMORY });
    let answer = account.request("POST", "/v3/templates", Some(&body))?;
    let requested: Value = decode(&action, &answer, 202)?;
    let id = |key: &str| requested[key].as_str().unwrap_or_default().to_owned();
    let template = Template {
        account,
        id: id("templateID"),
        name: kind.name.to_owned(),
    };
    let build = format!("/templates/{}/builds/{}", template.id, id("buildID"));
    let answer = account.request("POST", &format!("/v2{build}"), Some(&kind.start))?;
    expect(&action, &answer, &[202])?;
    let begun = Instant::now();
    while begun.elapsed() < LIMIT {
        let answer = account.request("GET", &format!("{build}/status"), None)?;
        let status: Value = decode(&action, &answer, 200)?;
        match status["status"].as_str() {
            Some("ready") => return Ok(template),
            Some("error") => {
                let reason = status["reason"]["message"].as_str().unwrap_or_default();
                return Err(failed(&action, reason));
            }
            _ => thread::sleep(POLL),
        }
    }
    Err(failed(&action, format!("it is not ready after {LIMIT:?}")))
}

/// Names of all templates from which sandboxes can be created, or ids for templates without a name.
pub(super) fn all(account: &Account) -> Result<Vec<String>, SandboxError> {
    let action = "list the templates";
    let answer = account.request("GET", "/templates", None)?;
    let listed: Vec<Value> = decode(action, &answer, 200)?;
    let ready = listed.iter().filter(|t| t["buildStatus"] == "ready");
    let named = ready.filter_map(|t| t["names"][0].as_str().or(t["templateID"].as_str()));
    Ok(named.map(str::to_owned).collect())
}
