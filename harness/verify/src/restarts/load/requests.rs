//! Requests to the control plane, and commands.

use std::time::Duration;

use envd::{EnvdClient, ExecRequest};
use model::clock::monotonic_ns;
use serde::Deserialize;
use stats::random::SplitMix64;

use super::{Fault, Site};
use crate::restarts::{
    event::{Seen, Work},
    guests::Guest,
    line::{Line, Pace, Trouble, connect},
};

/// Pauses between two requests of a client, so that the clients leave enough CPU time for the server to start.
const LOOK_UP: Duration = Duration::from_millis(3);
const LIST: Duration = Duration::from_millis(20);
const COMMAND: Duration = Duration::from_millis(30);
const COMMAND_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Deserialize)]
struct Listed {
    #[serde(rename = "sandboxID")]
    id: String,
}

/// Looks up one sandbox after another, each on a new connection.
pub(super) fn look_up(site: &Site<'_>, mut random: SplitMix64) {
    while site.goes_on() {
        let Some(guest) = site.guest(&mut random) else {
            return;
        };
        let began = monotonic_ns();
        let seen = get_one(site, guest).map_or_else(Fault::seen, |()| Seen::Done);
        site.record(Work::LookUp, began, seen);
        site.pause(LOOK_UP);
    }
}

fn get_one(site: &Site<'_>, guest: &Guest) -> Result<(), Fault> {
    let mut client = connect(site.api, &site.api.control, Pace::Full)?;
    let path = format!("/sandboxes/{}", guest.id());
    let answer = site.api.request(&mut client, "GET", &path, b"")?;
    match answer.status {
        200 => Ok(()),
        status => Err(Trouble::status(status, &String::from_utf8_lossy(&answer.body)).into()),
    }
}

/// Lists all sandboxes repeatedly on one connection.
pub(super) fn list(site: &Site<'_>, _: SplitMix64) {
    let mut kept = None;
    while site.goes_on() {
        let began = monotonic_ns();
        let seen = match get_all(site, &mut kept) {
            Ok(()) => Seen::Done,
            Err(fault) => {
                kept = None;
                fault.seen()
            }
        };
        site.record(Work::List, began, seen);
        site.pause(LIST);
    }
}

fn get_all(site: &Site<'_>, kept: &mut Option<EnvdClient<Line>>) -> Result<(), Fault> {
    let client = match kept {
        Some(client) => client,
        None => kept.insert(connect(site.api, &site.api.control, Pace::Full)?),
    };
    let answer = site.api.request(client, "GET", "/sandboxes", b"")?;
    if answer.status != 200 {
        return Err(Trouble::status(answer.status, &String::from_utf8_lossy(&answer.body)).into());
    }
    let listed: Vec<Listed> = serde_json::from_slice(&answer.body)
        .map_err(|error| Fault::Wrong(format!("the list cannot be decoded: {error}")))?;
    let is_listed = |guest: &&Guest| listed.iter().any(|listed| listed.id == guest.id());
    let missing = site.guests.all().iter().filter(|g| !is_listed(g)).count();
    if missing > 0 {
        return Err(Fault::Wrong(format!(
            "{missing} sandboxes are missing in the list"
        )));
    }
    if client.is_closing() {
        *kept = None;
    }
    Ok(())
}

/// Runs commands in random sandboxes, each on a new connection.
pub(super) fn command(site: &Site<'_>, mut random: SplitMix64) {
    while site.goes_on() {
        let Some(guest) = site.guest(&mut random) else {
            return;
        };
        let began = monotonic_ns();
        let done = guest
            .agent(site.api, Pace::Full)
            .map_err(Fault::from)
            .and_then(|mut agent| echo(&mut agent, random.next_u64()));
        let seen = done.map_or_else(Fault::seen, |()| Seen::Done);
        site.record(Work::Command, began, seen);
        site.pause(COMMAND);
    }
}

/// Runs commands in random sandboxes, all on one connection.
pub(super) fn command_kept(site: &Site<'_>, mut random: SplitMix64) {
    let mut kept = None;
    while site.goes_on() {
        let Some(guest) = site.guest(&mut random) else {
            return;
        };
        let began = monotonic_ns();
        let done = on_kept(site, guest, &mut kept, random.next_u64());
        let seen = match done {
            Ok(()) => Seen::Done,
            Err(fault) => {
                kept = None;
                fault.seen()
            }
        };
        site.record(Work::CommandKept, began, seen);
        site.pause(COMMAND);
    }
}

fn on_kept(
    site: &Site<'_>,
    guest: &Guest,
    kept: &mut Option<EnvdClient<Line>>,
    token: u64,
) -> Result<(), Fault> {
    let client = match kept {
        Some(client) => client,
        None => kept.insert(connect(site.api, &site.api.control, Pace::Full)?),
    };
    guest.route(site.api, client);
    echo(client, token)?;
    if client.is_closing() {
        *kept = None;
    }
    Ok(())
}

fn echo(agent: &mut EnvdClient<Line>, token: u64) -> Result<(), Fault> {
    let token = format!("{token:x}");
    let done = agent.exec(&ExecRequest::new("/bin/echo", &[&token]), COMMAND_TIMEOUT)?;
    let output = String::from_utf8_lossy(&done.stdout);
    if done.exit_code == 0 && output.trim_end() == token {
        return Ok(());
    }
    Err(Fault::Wrong(format!(
        "the command ended with {:?} and printed {output:?} instead of {token}",
        done.status
    )))
}
