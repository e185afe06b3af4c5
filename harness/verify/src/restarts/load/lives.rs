//! Sandboxes that are continuously created, paused, resumed and killed. Each response is recorded as the fate of
//! its sandbox; a request without a response leaves two possible fates.

use std::time::Duration;

use envd::HttpAnswer;
use model::clock::monotonic_ns;
use serde_json::Value;
use stats::random::SplitMix64;
use testbed::api::Created;

use super::{Fault, Site};
use crate::restarts::{
    event::{Cause, Fate, Record, Seen, Work},
    guests,
    line::{Pace, Trouble, connect},
};

/// Pause after each change, because changes cost much CPU time.
const STEP: Duration = Duration::from_millis(200);
/// Body of a resume.
const TIMEOUT: &str = r#"{"timeout":80000}"#;
const NOTE: &str = "/dev/shm/note";

/// Creates and kills sandboxes.
pub(super) fn births(site: &Site<'_>, _: SplitMix64) {
    while site.goes_on() {
        if let Some(created) = create(site) {
            site.pause(STEP);
            kill(site, &created.sandbox_id);
        }
        site.pause(STEP);
    }
}

/// Pauses and resumes one sandbox, whose memory must keep a note.
pub(super) fn naps(site: &Site<'_>, _: SplitMix64) {
    while site.goes_on() {
        let Some(created) = create(site) else {
            continue;
        };
        if write_note(site, &created).is_err() {
            kill(site, &created.sandbox_id);
            continue;
        }
        while site.goes_on() && nap(site, &created) == Life::GoesOn {}
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Life {
    GoesOn,
    Lost,
}

fn create(site: &Site<'_>) -> Option<Created> {
    let began = monotonic_ns();
    match guests::create(site.api, site.template) {
        Ok(created) => {
            site.fate(&created.sandbox_id, Fate::Running);
            site.record(Work::Create, began, Seen::Done);
            Some(created)
        }
        Err(trouble) => {
            if is_unanswered(&trouble) {
                let _ = site.log.send(Record::PerhapsBorn);
            }
            site.record(Work::Create, began, trouble.failed());
            None
        }
    }
}

fn kill(site: &Site<'_>, id: &str) {
    site.fate(id, Fate::PerhapsGone);
    let mut is_first = true;
    loop {
        let began = monotonic_ns();
        let done = change(site, "DELETE", &format!("/sandboxes/{id}"), b"", &[204]);
        let (seen, is_gone) = match done {
            Ok(_) => (Seen::Done, true),
            // An earlier kill without a response has ended the sandbox.
            Err(trouble) if trouble.cause == Cause::NotFound && !is_first => (Seen::Done, true),
            Err(trouble) => (trouble.failed(), false),
        };
        is_first = false;
        site.record(Work::Kill, began, seen);
        if is_gone {
            site.fate(id, Fate::Gone);
        }
        if is_gone || !site.goes_on() {
            return;
        }
    }
}

fn write_note(site: &Site<'_>, created: &Created) -> Result<(), Trouble> {
    let mut agent = guests::agent(created, site.api, Pace::Full)?;
    agent.write_file(NOTE, created.sandbox_id.as_bytes(), None)?;
    Ok(())
}

fn nap(site: &Site<'_>, created: &Created) -> Life {
    let id = &created.sandbox_id;
    let pause = format!("/sandboxes/{id}/pause");
    let resume = format!("/v2/sandboxes/{id}/connect");
    for (work, path, body, fate) in [
        (Work::Pause, pause, "{}", Fate::Paused),
        (Work::Resume, resume, TIMEOUT, Fate::Running),
    ] {
        site.fate(id, Fate::Either);
        let began = monotonic_ns();
        let seen = match change(site, "POST", &path, body.as_bytes(), &[200, 201, 204]) {
            Ok(_) => {
                site.fate(id, fate);
                Seen::Done
            }
            Err(trouble) => trouble.failed(),
        };
        let failed = seen != Seen::Done;
        site.record(work, began, seen);
        if failed {
            return recover(site, created);
        }
        site.pause(STEP);
    }
    let began = monotonic_ns();
    match read_note(site, created) {
        Ok(()) => Life::GoesOn,
        Err(Fault::Trouble(trouble)) => {
            site.record(Work::Resume, began, trouble.failed());
            Life::GoesOn
        }
        Err(fault) => {
            site.record(Work::Resume, began, fault.seen());
            Life::Lost
        }
    }
}

fn read_note(site: &Site<'_>, created: &Created) -> Result<(), Fault> {
    let bytes = guests::agent(created, site.api, Pace::Full)?.read_file(NOTE, None)?;
    if bytes == created.sandbox_id.as_bytes() {
        return Ok(());
    }
    Err(Fault::Wrong(format!(
        "{} lost the note in its memory by a pause and a resume",
        created.sandbox_id
    )))
}

/// After a failed request, waits until the server reports which of the possible states the sandbox has, and resumes
/// it if needed.
fn recover(site: &Site<'_>, created: &Created) -> Life {
    let id = &created.sandbox_id;
    while site.goes_on() {
        let began = monotonic_ns();
        match change(site, "GET", &format!("/sandboxes/{id}"), b"", &[200]) {
            Ok(answer) => {
                let detail: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
                let connect = format!("/v2/sandboxes/{id}/connect");
                let is_up = detail["state"] == "running"
                    || change(site, "POST", &connect, TIMEOUT.as_bytes(), &[200, 201]).is_ok();
                if is_up {
                    site.fate(id, Fate::Running);
                    return Life::GoesOn;
                }
            }
            Err(trouble) if trouble.cause == Cause::NotFound => {
                let what = format!("{id} is lost after a pause or a resume without an answer");
                site.record(Work::Pause, began, Seen::Wrong(what));
                return Life::Lost;
            }
            Err(_) => {}
        }
        site.pause(STEP);
    }
    Life::Lost
}

/// Whether the server may have carried out a request that failed in this way.
fn is_unanswered(trouble: &Trouble) -> bool {
    matches!(
        trouble.cause,
        Cause::Reset | Cause::Timeout | Cause::Malformed
    )
}

fn change(
    site: &Site<'_>,
    method: &str,
    path: &str,
    body: &[u8],
    statuses: &[u16],
) -> Result<HttpAnswer, Trouble> {
    let mut client = connect(site.api, &site.api.control, Pace::Full)?;
    let answer = site.api.request(&mut client, method, path, body)?;
    if statuses.contains(&answer.status) {
        return Ok(answer);
    }
    let body = String::from_utf8_lossy(&answer.body);
    Err(Trouble::status(answer.status, &body))
}
