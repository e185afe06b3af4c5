//! Alerts: run an operator's command or call a webhook after a number of refused packets or requests of a sandbox.
//! Counting and delivery each have their own thread, and nothing waits for them.

use std::{
    collections::HashMap,
    io::{self, Write},
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::mpsc::{Receiver, SyncSender, sync_channel},
    thread,
    time::{Duration, Instant, SystemTime},
};

use model::SandboxId;
use serde::Serialize;
use tracing::{info, warn};

use crate::{
    auth::random_hex,
    events::{Events, Refusal},
    webhook::{JSON, Webhook},
};

const FORMAT: u32 = 1;
/// Maximum number of refusals waiting to be counted, and of alerts waiting to be delivered. Excess ones are dropped.
const REFUSALS: usize = 4096;
const ALERTS: usize = 64;
/// Maximum number of sandboxes with counts. When exceeded, all counts are dropped to bound memory.
const MAX_SANDBOXES: usize = 4096;
/// Minimum interval between two alerts of a sandbox.
const INTERVAL: Duration = Duration::from_secs(60);
/// Time limit of a delivery, and the pauses before retries.
const PATIENCE: Duration = Duration::from_secs(10);
const AGAIN: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(5)];
const POLL: Duration = Duration::from_millis(20);

/// When and how to alert.
#[derive(Clone, Debug)]
pub struct AlertSpec {
    /// Number of refusals of one sandbox that cause an alert; at least 1.
    pub refusals: u64,
    pub action: AlertAction,
}

#[derive(Clone, Debug)]
pub enum AlertAction {
    /// A program that receives the alert as JSON on its standard input.
    Command(PathBuf),
    /// A server that receives the alert as the body of a POST.
    Webhook(Webhook),
}

/// The alert sent to the operator.
#[derive(Clone, Debug, Serialize)]
struct Alert {
    format: u32,
    /// The same in repeated deliveries.
    id: String,
    time: String,
    sandbox: SandboxId,
    /// Number since the last alert of the sandbox.
    refusals: u64,
    last: Last,
}

#[derive(Clone, Debug, Serialize)]
struct Last {
    destination: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    reason: String,
}

/// A handle. The threads exit when the last one is dropped.
#[derive(Clone, Debug)]
pub(crate) struct Alerts {
    /// `None` if the operator has not configured alerts.
    queue: Option<SyncSender<Message>>,
    /// Webhooks of clients.
    events: Option<Events>,
}

#[derive(Debug)]
enum Message {
    Refused(Refusal),
    Ended(SandboxId),
}

impl Alerts {
    /// # Errors
    /// Returns an error if a thread cannot be started.
    pub(crate) fn start(spec: Option<AlertSpec>, events: Option<Events>) -> io::Result<Self> {
        let queue = spec.map(count_and_deliver).transpose()?;
        Ok(Self { queue, events })
    }

    pub(crate) fn refused(&self, refusal: Refusal) {
        if let Some(events) = &self.events {
            events.refused(&refusal);
        }
        if let Some(queue) = &self.queue {
            // A full queue means that many more refusals than the configured number have been counted.
            let _dropped = queue.try_send(Message::Refused(refusal));
        }
    }

    pub(crate) fn forget(&self, sandbox: &SandboxId) {
        if let Some(queue) = &self.queue {
            let _kept_longer = queue.try_send(Message::Ended(sandbox.clone()));
        }
    }
}

/// Starts the threads, and returns their queue.
fn count_and_deliver(spec: AlertSpec) -> io::Result<SyncSender<Message>> {
    let (queue, messages) = sync_channel(REFUSALS);
    let (due, alerts) = sync_channel(ALERTS);
    let AlertSpec { refusals, action } = spec;
    thread::Builder::new()
        .name("alert-count".into())
        .spawn(move || count_all(&messages, refusals, &due))?;
    thread::Builder::new()
        .name("alert-deliver".into())
        .spawn(move || deliver_all(&alerts, &action))?;
    Ok(queue)
}

/// Refusals by sandbox. Pure: the time is passed in.
struct Counts {
    limit: u64,
    counts: HashMap<SandboxId, Count>,
}

#[derive(Default)]
struct Count {
    refusals: u64,
    last_alert: Option<Instant>,
}

impl Counts {
    /// Counts a refusal. If an alert is due, returns the number since the last alert.
    fn add(&mut self, refusal: &Refusal, now: Instant) -> Option<u64> {
        if self.counts.len() >= MAX_SANDBOXES && !self.counts.contains_key(&refusal.sandbox) {
            self.counts.clear();
        }
        let count = self.counts.entry(refusal.sandbox.clone()).or_default();
        count.refusals = count.refusals.saturating_add(refusal.count);
        let is_early = count
            .last_alert
            .is_some_and(|last| now.saturating_duration_since(last) < INTERVAL);
        if count.refusals < self.limit || is_early {
            return None;
        }
        count.last_alert = Some(now);
        Some(std::mem::take(&mut count.refusals))
    }
}

fn count_all(messages: &Receiver<Message>, limit: u64, due: &SyncSender<Alert>) {
    let mut counts = Counts {
        limit: limit.max(1),
        counts: HashMap::new(),
    };
    for message in messages {
        let refusal = match message {
            Message::Ended(sandbox) => {
                counts.counts.remove(&sandbox);
                continue;
            }
            Message::Refused(refusal) => refusal,
        };
        let Some(refusals) = counts.add(&refusal, Instant::now()) else {
            continue;
        };
        let alert = Alert {
            format: FORMAT,
            id: random_hex::<16>().unwrap_or_default(),
            time: humantime::format_rfc3339_millis(SystemTime::now()).to_string(),
            sandbox: refusal.sandbox,
            refusals,
            last: Last {
                destination: refusal.destination,
                name: refusal.name,
                reason: refusal.reason,
            },
        };
        let sandbox = alert.sandbox.clone();
        if due.try_send(alert).is_err() {
            warn!(%sandbox, refusals, "dropped an alert: earlier alerts are still being delivered");
        }
    }
}

fn deliver_all(alerts: &Receiver<Alert>, action: &AlertAction) {
    for alert in alerts {
        let Ok(body) = serde_json::to_vec(&alert) else {
            continue;
        };
        let mut pauses = AGAIN.iter();
        loop {
            let outcome = match action {
                AlertAction::Command(program) => run(program, &body),
                // The operator's own URL: any address is allowed.
                AlertAction::Webhook(webhook) => webhook
                    .post(JSON, "", &body, |_| Ok(()))
                    .map(drop)
                    .map_err(io::Error::other),
            };
            let (sandbox, refusals) = (&alert.sandbox, alert.refusals);
            let Err(why) = outcome else {
                info!(%sandbox, refusals, "delivered an alert");
                break;
            };
            match pauses.next() {
                Some(pause) => thread::sleep(*pause),
                None => {
                    warn!(%sandbox, refusals, why = %why, "cannot deliver an alert");
                    break;
                }
            }
        }
    }
}

/// Runs the operator's program. Of the server's environment, it gets only PATH.
fn run(program: &PathBuf, body: &[u8]) -> io::Result<()> {
    let mut command = Command::new(program);
    command
        .env_clear()
        .stdin(Stdio::piped())
        .stdout(Stdio::null());
    if let Some(path) = std::env::var_os("PATH") {
        command.env("PATH", path);
    }
    let mut child = command.spawn()?;
    // An alert is smaller than a pipe's buffer, so this does not wait for the program. A program that does not read it
    // may still succeed.
    let written = child.stdin.take().map(|mut stdin| stdin.write_all(body));
    let status = wait(&mut child)?;
    match (status.success(), written) {
        (true, _) => Ok(()),
        (false, _) => Err(io::Error::other(format!(
            "{} ended with {status}",
            program.display()
        ))),
    }
}

fn wait(child: &mut Child) -> io::Result<std::process::ExitStatus> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if Instant::now() >= deadline {
            child.kill()?;
            child.wait()?;
            return Err(io::ErrorKind::TimedOut.into());
        }
        thread::sleep(POLL);
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, BufReader, Read},
        net::TcpListener,
        os::unix::fs::PermissionsExt,
    };

    use super::*;

    fn refusal(count: u64) -> Refusal {
        Refusal {
            sandbox: SandboxId::from_random([3; 19]),
            count,
            destination: "10.0.0.1:443".into(),
            name: Some("a.test".into()),
            reason: "policy".into(),
        }
    }

    #[test]
    fn an_alert_is_due_after_each_number_of_refusals_and_not_too_often() {
        let mut counts = Counts {
            limit: 3,
            counts: HashMap::new(),
        };
        let start = Instant::now();
        assert_eq!(counts.add(&refusal(2), start), None);
        assert_eq!(counts.add(&refusal(2), start), Some(4));
        assert_eq!(counts.add(&refusal(9), start), None, "too early");
        assert_eq!(counts.add(&refusal(1), start + INTERVAL), Some(10));
        assert_eq!(counts.add(&refusal(2), start + 3 * INTERVAL), None);
    }

    #[test]
    fn a_webhook_gets_each_alert_and_redirects_are_not_followed() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/hook", listener.local_addr().unwrap());
        let spec = AlertSpec {
            refusals: 2,
            action: AlertAction::Webhook(url.parse().unwrap()),
        };
        let alerts = Alerts::start(Some(spec), None).unwrap();
        alerts.refused(refusal(1));
        alerts.refused(refusal(1));
        let mut ids = Vec::new();
        let moved = format!("HTTP/1.1 302 Found\r\nLocation: {url}/other\r\n\r\n");
        for answer in [moved.as_str(), "HTTP/1.1 204 No Content\r\n\r\n"] {
            let (mut stream, _) = listener.accept().unwrap();
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            assert_eq!(line, "POST /hook HTTP/1.1\r\n");
            let mut length = 0;
            loop {
                line.clear();
                reader.read_line(&mut line).unwrap();
                if let Some(text) = line.strip_prefix("Content-Length: ") {
                    length = text.trim().parse().unwrap();
                }
                if line == "\r\n" {
                    break;
                }
            }
            let mut body = vec![0; length];
            reader.read_exact(&mut body).unwrap();
            let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
            assert_eq!(body["refusals"], 2);
            assert_eq!(body["last"]["reason"], "policy");
            ids.push(body["id"].as_str().unwrap().to_owned());
            stream.write_all(answer.as_bytes()).unwrap();
        }
        assert_eq!(ids[0], ids[1]);
    }

    #[test]
    fn a_command_gets_the_alert_and_its_failure_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let (program, seen) = (dir.path().join("alert"), dir.path().join("seen"));
        let script = |last: &str| {
            let text = format!("#!/bin/sh\ncat > {}\n{last}\n", seen.display());
            std::fs::write(&program, text).unwrap();
            std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o700)).unwrap();
        };
        script("exit 0");
        run(&program, b"{}").unwrap();
        assert_eq!(std::fs::read(&seen).unwrap(), b"{}");
        script("exit 3");
        assert!(run(&program, b"{}").unwrap_err().to_string().contains('3'));
    }
}
