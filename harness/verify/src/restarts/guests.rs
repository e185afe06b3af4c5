//! The sandboxes that live for the whole run. Each keeps a number in its memory, which every restart must preserve.

use std::{
    ops::RangeInclusive,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
};

use envd::{ENVD_PORT, EnvdClient};
use serde_json::{Value, json};
use testbed::api::{Api, Created};

use super::{
    OUTSIDE,
    line::{Line, Pace, Trouble, connect},
};
use crate::sandbox::{SandboxError, failed};

/// Lifetime of sandboxes in seconds: longer than any run.
const LIFETIME_S: u32 = 80_000;
/// File in the memory of a sandbox.
const FILE: &str = "/dev/shm/prover-number";
/// Sandboxes that are created at the same time.
const AT_ONCE: usize = 4;

/// A sandbox of the run.
#[derive(Debug)]
pub(super) struct Guest {
    created: Created,
    /// The numbers that the file may contain: the last acknowledged one, and the last one that was sent.
    written: AtomicU64,
    sent: AtomicU64,
    /// Set when the sandbox is lost, so that later restarts do not wait for it.
    is_lost: AtomicBool,
}

/// The sandboxes of the run.
#[derive(Debug)]
pub(super) struct Guests(Vec<Guest>);

/// The body of a create.
pub(super) fn create_body(template: &str) -> Value {
    json!({
        "templateID": template,
        "timeout": LIFETIME_S,
        "network": { "allowOut": [OUTSIDE], "denyOut": ["0.0.0.0/0"] },
    })
}

/// Creates a sandbox.
pub(super) fn create(api: &Api, template: &str) -> Result<Created, Trouble> {
    let mut client = connect(api, &api.control, Pace::Full)?;
    let body = create_body(template).to_string();
    let answer = api.request(&mut client, "POST", "/v2/sandboxes", body.as_bytes())?;
    if answer.status != 201 {
        return Err(Trouble::status(
            answer.status,
            &String::from_utf8_lossy(&answer.body),
        ));
    }
    serde_json::from_slice(&answer.body).map_err(|error| Trouble {
        cause: super::event::Cause::Malformed,
        text: error.to_string(),
    })
}

impl Guests {
    /// Creates the sandboxes and writes their first numbers.
    pub(super) fn create(api: &Api, template: &str, count: usize) -> Result<Self, SandboxError> {
        let made = AtomicU64::new(0);
        let count = u64::try_from(count).unwrap_or(u64::MAX);
        let make = || {
            let mut guests = Vec::new();
            while made.fetch_add(1, Ordering::Relaxed) < count {
                let created = create(api, template)?;
                let guest = Guest {
                    created,
                    written: AtomicU64::new(0),
                    sent: AtomicU64::new(0),
                    is_lost: AtomicBool::new(false),
                };
                guest.write_next(api)?;
                guests.push(guest);
            }
            Ok::<_, Trouble>(guests)
        };
        let made = thread::scope(|scope| {
            let makers: Vec<_> = (0..AT_ONCE).map(|_| scope.spawn(make)).collect();
            makers
                .into_iter()
                .map(|maker| {
                    maker
                        .join()
                        .unwrap_or_else(|p| std::panic::resume_unwind(p))
                })
                .collect::<Result<Vec<_>, _>>()
        });
        match made {
            Ok(guests) => Ok(Self(guests.into_iter().flatten().collect())),
            Err(trouble) => Err(failed("create the sandboxes of the run", trouble.text)),
        }
    }

    pub(super) fn all(&self) -> &[Guest] {
        &self.0
    }

    /// Picks a guest. There is always one, because the command line requires at least one sandbox.
    pub(super) fn pick(&self, random: u64) -> Option<&Guest> {
        let count = u64::try_from(self.0.len()).ok()?;
        self.0
            .get(usize::try_from(random.checked_rem(count)?).ok()?)
    }
}

impl Guest {
    pub(super) fn id(&self) -> &str {
        &self.created.sandbox_id
    }

    /// Routes later requests of a connection to the agent of this sandbox.
    pub(super) fn route(&self, api: &Api, client: &mut EnvdClient<Line>) {
        route(&self.created, api, client);
    }

    /// Opens a connection to the agent.
    pub(super) fn agent(&self, api: &Api, pace: Pace) -> Result<EnvdClient<Line>, Trouble> {
        agent(&self.created, api, pace)
    }

    /// Reads the number.
    pub(super) fn read(&self, api: &Api) -> Result<u64, Trouble> {
        let bytes = self.agent(api, Pace::Full)?.read_file(FILE, None)?;
        Ok(String::from_utf8_lossy(&bytes).trim().parse().unwrap_or(0))
    }

    /// The numbers that the sandbox may contain.
    pub(super) fn expected(&self) -> RangeInclusive<u64> {
        self.written.load(Ordering::Relaxed)..=self.sent.load(Ordering::Relaxed)
    }

    pub(super) fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Relaxed)
    }

    pub(super) fn mark_lost(&self) {
        self.is_lost.store(true, Ordering::Relaxed);
    }

    /// Writes the next number.
    pub(super) fn write_next(&self, api: &Api) -> Result<(), Trouble> {
        let next = self.sent.load(Ordering::Relaxed) + 1;
        let mut agent = self.agent(api, Pace::Full)?;
        self.sent.store(next, Ordering::Relaxed);
        agent.write_file(FILE, next.to_string().as_bytes(), None)?;
        self.written.store(next, Ordering::Relaxed);
        Ok(())
    }
}

/// Opens a connection to the agent of a sandbox.
pub(super) fn agent(created: &Created, api: &Api, pace: Pace) -> Result<EnvdClient<Line>, Trouble> {
    let mut client = connect(api, &api.control, pace)?;
    route(created, api, &mut client);
    Ok(client)
}

fn route(created: &Created, api: &Api, client: &mut EnvdClient<Line>) {
    created.route(client, &api.control, ENVD_PORT);
}
