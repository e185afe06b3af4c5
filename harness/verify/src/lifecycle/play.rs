//! Plays a plan with several concurrent clients, and records every response.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};

use model::clock::{monotonic_ns, nanoseconds};
use serde::Serialize;

use super::{
    plan::{Action, AtDeadline, CLIENTS, Handle, Image, Op, Place, Step},
    site::{Guest, Miss, Reply, Seen, Site},
};

/// The timeout that [`Action::Expire`] sets, in seconds.
pub(super) const SOON_S: u32 = 1;
/// The deadline never takes effect earlier than this. Servers count in milliseconds, by a clock that may be
/// adjusted.
const SOON: Duration = Duration::from_millis(SOON_S as u64 * 1000 - 50);
/// Maximum wait for a restarting server, and for a deadline to take effect.
const PATIENCE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(2);
/// Interval between two checks whether a deadline has taken effect.
const ASK_AGAIN: Duration = Duration::from_millis(50);
/// Number of the client that checks everything after the others have ended.
const LAST: u8 = CLIENTS;

/// An action and its response. Times are nanoseconds of CLOCK_MONOTONIC.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Call {
    /// The step of the plan; `None` for actions that end the episode.
    pub(super) step: Option<usize>,
    pub(super) client: u8,
    pub(super) on: Handle,
    pub(super) action: Action,
    pub(super) invoked_ns: u64,
    pub(super) returned_ns: u64,
    pub(super) outcome: Result<Reply, Miss>,
}

/// The source of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Origin {
    Template,
    Snapshot(Image),
    Fork(Handle),
}

/// A create, or the response of a fork for its new sandbox.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Birth {
    pub(super) step: usize,
    pub(super) to: Handle,
    pub(super) from: Origin,
    pub(super) at_deadline: AtDeadline,
    pub(super) invoked_ns: u64,
    pub(super) returned_ns: u64,
    /// The id.
    pub(super) outcome: Result<String, Miss>,
}

/// The complete history of an episode.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct History {
    pub(super) calls: Vec<Call>,
    pub(super) births: Vec<Birth>,
    /// From each SIGKILL of the server to the first response of the next one.
    pub(super) outages: Vec<(u64, u64)>,
    /// Ids in the last list that no response has named.
    pub(super) unknown: Vec<String>,
    /// Findings of the site and of the check for leaks.
    pub(super) faults: Vec<String>,
}

/// Sandboxes and snapshots behind handles. Each is set once, to `None` if it was not made.
struct Bindings {
    guests: BTreeMap<Handle, OnceLock<Option<Guest>>>,
    at_deadline: BTreeMap<Handle, AtDeadline>,
    images: BTreeMap<Image, OnceLock<Option<String>>>,
}

/// The records of one client.
struct Client<'a> {
    site: &'a dyn Site,
    bindings: &'a Bindings,
    number: u8,
    history: History,
}

/// Plays these steps of a plan, ends everything that they made, and checks for leaks.
pub(super) fn play(site: &dyn Site, steps: &[Step]) -> History {
    let bindings = Bindings::of(steps);
    let new_client = |number| Client {
        site,
        bindings: &bindings,
        number,
        history: History::default(),
    };
    let mut history = thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|number| {
                let mut client = new_client(number);
                scope.spawn(move || {
                    for step in steps.iter().filter(|step| step.client == number) {
                        client.perform(*step);
                    }
                    client.history
                })
            })
            .collect();
        let mut history = History::default();
        for client in clients {
            let part = client.join();
            history.add(part.unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        history
    });
    let mut last = new_client(LAST);
    last.end_everything();
    history.add(last.history);
    history.calls.sort_by_key(|call| call.invoked_ns);
    history
}

impl History {
    fn add(&mut self, other: Self) {
        self.calls.extend(other.calls);
        self.births.extend(other.births);
        self.outages.extend(other.outages);
        self.unknown.extend(other.unknown);
        self.faults.extend(other.faults);
    }
}

impl Bindings {
    fn of(steps: &[Step]) -> Self {
        let mut this = Self {
            guests: BTreeMap::new(),
            at_deadline: BTreeMap::new(),
            images: BTreeMap::new(),
        };
        for step in steps {
            match step.op {
                Op::Create {
                    to, at_deadline, ..
                } => {
                    this.guests.insert(to, OnceLock::new());
                    this.at_deadline.insert(to, at_deadline);
                }
                Op::On(of, Action::Fork(to)) => {
                    this.guests.insert(to, OnceLock::new());
                    // At its deadline, a fork behaves like its source.
                    let of = this.at_deadline.get(&of).copied();
                    this.at_deadline.insert(to, of.unwrap_or(AtDeadline::End));
                }
                Op::On(_, Action::Snapshot(image)) => {
                    this.images.insert(image, OnceLock::new());
                }
                Op::On(..) | Op::List | Op::KillServer { .. } => {}
            }
        }
        this
    }

    /// The sandbox, as soon as its create has returned. `None`: there is none.
    fn guest(&self, handle: Handle) -> Option<Guest> {
        await_set(self.guests.get(&handle)?).clone()
    }

    fn image(&self, image: Image) -> Option<String> {
        await_set(self.images.get(&image)?).clone()
    }

    /// Sandboxes known so far.
    fn known(&self) -> impl Iterator<Item = (Handle, &Guest)> {
        let guests = self.guests.iter();
        guests.filter_map(|(handle, cell)| Some((*handle, cell.get()?.as_ref()?)))
    }
}

/// Waits until another client has set the value. It always does: a step waits only for earlier steps of the plan.
fn await_set<T>(value: &OnceLock<T>) -> &T {
    loop {
        match value.get() {
            Some(value) => return value,
            None => thread::sleep(POLL),
        }
    }
}

impl Client<'_> {
    fn perform(&mut self, step: Step) {
        match step.op {
            Op::Create {
                to,
                from,
                at_deadline,
            } => self.create(step.number, to, from, at_deadline),
            Op::On(on, action) => {
                if let Some(guest) = self.bindings.guest(on) {
                    self.on(step.number, on, &guest, action);
                } else {
                    self.unbind(action);
                }
            }
            Op::List => drop(self.list(Some(step.number))),
            Op::KillServer { twice } => {
                let began = monotonic_ns();
                if let Err(fault) = self.site.kill_server(twice) {
                    self.history.faults.push(fault);
                }
                self.history.outages.push((began, monotonic_ns()));
            }
        }
    }

    /// Repeats a request while the server does not accept connections, because such a request has no effect.
    fn send<T>(&self, request: impl Fn() -> Result<T, Miss>) -> (u64, Result<T, Miss>) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let invoked_ns = monotonic_ns();
            match request() {
                Err(Miss::NotSent(_)) if Instant::now() < deadline => thread::sleep(POLL),
                outcome => return (invoked_ns, outcome),
            }
        }
    }

    fn create(&mut self, step: usize, to: Handle, from: Option<Image>, at_deadline: AtDeadline) {
        let id = from.map(|image| self.bindings.image(image));
        // The snapshot was not made.
        if id == Some(None) {
            return self.bind(to, None);
        }
        let id = id.flatten();
        let (invoked_ns, made) = self.send(|| self.site.create(id.as_deref(), at_deadline));
        let from = from.map_or(Origin::Template, Origin::Snapshot);
        self.born(step, to, from, invoked_ns, made);
    }

    fn born(
        &mut self,
        step: usize,
        to: Handle,
        from: Origin,
        invoked_ns: u64,
        made: Result<Guest, Miss>,
    ) {
        self.history.births.push(Birth {
            step,
            to,
            from,
            at_deadline: self.bindings.at_deadline[&to],
            invoked_ns,
            returned_ns: monotonic_ns(),
            outcome: made
                .as_ref()
                .map(|guest| guest.id.clone())
                .map_err(Clone::clone),
        });
        self.bind(to, made.ok());
    }

    fn bind(&self, to: Handle, guest: Option<Guest>) {
        if let Some(cell) = self.bindings.guests.get(&to) {
            // Only the step that makes the sandbox sets this.
            let _ = cell.set(guest);
        }
    }

    /// An action on a sandbox that was not made does not make anything.
    fn unbind(&self, action: Action) {
        match action {
            Action::Fork(to) => self.bind(to, None),
            Action::Snapshot(image) => self.bind_image(image, None),
            _ => {}
        }
    }

    fn bind_image(&self, image: Image, id: Option<String>) {
        if let Some(cell) = self.bindings.images.get(&image) {
            let _ = cell.set(id);
        }
    }

    fn on(&mut self, step: usize, on: Handle, guest: &Guest, action: Action) {
        let number = Some(step);
        match action {
            Action::Fork(to) => {
                let (invoked_ns, made) = self.send(|| self.site.fork(guest));
                let outcome = made.as_ref().map(|_| Reply::Done).map_err(Clone::clone);
                self.record(number, on, action, invoked_ns, answered(outcome));
                if made.is_ok() {
                    self.born(step, to, Origin::Fork(on), invoked_ns, made);
                } else {
                    self.bind(to, None);
                }
            }
            Action::Snapshot(image) => {
                let (invoked_ns, made) = self.send(|| self.site.snapshot(guest));
                let outcome = made.as_ref().map(|_| Reply::Done).map_err(Clone::clone);
                self.record(number, on, action, invoked_ns, answered(outcome));
                self.bind_image(image, made.ok());
            }
            Action::KillVmm => {
                let invoked_ns = monotonic_ns();
                if let Some(settled) = self.site.kill_vmm(guest) {
                    if let Err(fault) = settled {
                        self.history.faults.push(fault);
                    }
                    self.record(number, on, action, invoked_ns, Ok(Reply::Done));
                }
            }
            Action::Expire => self.expire(step, on, guest),
            _ => {
                let _ = self.act(number, on, guest, action);
            }
        }
    }

    fn act(
        &mut self,
        step: Option<usize>,
        on: Handle,
        guest: &Guest,
        action: Action,
    ) -> Result<Reply, Miss> {
        let (invoked_ns, outcome) = self.send(|| self.site.act(guest, action));
        let outcome = answered(outcome);
        self.record(step, on, action, invoked_ns, outcome.clone());
        outcome
    }

    fn record(
        &mut self,
        step: Option<usize>,
        on: Handle,
        action: Action,
        invoked_ns: u64,
        outcome: Result<Reply, Miss>,
    ) {
        self.history.calls.push(Call {
            step,
            client: self.number,
            on,
            action,
            invoked_ns,
            returned_ns: monotonic_ns(),
            outcome,
        });
    }

    /// Sets a short timeout, and waits until the sandbox has ended or been paused, or until it should have been.
    fn expire(&mut self, step: usize, on: Handle, guest: &Guest) {
        let (sent_ns, outcome) = self.send(|| self.site.act(guest, Action::Expire));
        let outcome = answered(outcome);
        self.record(Some(step), on, Action::Expire, sent_ns, outcome.clone());
        if !matches!(outcome, Ok(Reply::Done) | Err(Miss::Failed(_))) {
            return;
        }
        let due_ns = sent_ns + nanoseconds(SOON);
        let deadline = Instant::now() + PATIENCE;
        let (asked_ns, seen, is_late) = loop {
            thread::sleep(ASK_AGAIN);
            let asked_ns = monotonic_ns();
            let seen = answered(self.site.act(guest, Action::Look));
            let is_over = matches!(&seen, Ok(Reply::State(Seen::Absent | Seen::Paused)));
            // Another client may have moved the deadline, or, without a response, it may not have been set.
            let is_vain = !is_over && monotonic_ns() > due_ns && !self.site.ends_soon(guest);
            let is_late = !is_over && !is_vain && Instant::now() > deadline;
            if is_over || is_vain || is_late {
                break (asked_ns, seen, is_late);
            }
        };
        self.record(Some(step), on, Action::Look, asked_ns, seen);
        self.record(Some(step), on, Action::Deadline, due_ns, outcome);
        if let Some(call) = self.history.calls.last_mut() {
            // The deadline never takes effect before it is due. If the last check was late, it must have taken
            // effect before that check.
            let until_ns = if is_late { asked_ns } else { call.returned_ns };
            call.returned_ns = until_ns.max(due_ns);
        }
    }

    /// Lists all sandboxes, and records the state of each known one.
    fn list(&mut self, step: Option<usize>) -> BTreeMap<String, Seen> {
        let bindings = self.bindings;
        let known: Vec<(Handle, &Guest)> = bindings.known().collect();
        let (invoked_ns, listed) = self.send(|| self.site.list());
        let state = |guest: &Guest| match &listed {
            Ok(all) => Ok(Reply::State(
                all.get(&guest.id).copied().unwrap_or(Seen::Absent),
            )),
            Err(miss) => Err(miss.clone()),
        };
        for (handle, guest) in known {
            self.record(step, handle, Action::Look, invoked_ns, state(guest));
        }
        listed.unwrap_or_default()
    }

    /// Reads all values, ends all sandboxes, removes all snapshots, tries to remove the template, and checks for
    /// leaks.
    fn end_everything(&mut self) {
        let bindings = self.bindings;
        for (handle, guest) in bindings.known() {
            let Ok(Reply::State(seen)) = self.act(None, handle, guest, Action::Look) else {
                continue;
            };
            if seen == Seen::Paused {
                let _ = self.act(None, handle, guest, Action::Connect);
            }
            if seen != Seen::Absent {
                for place in [Place::Disk, Place::Memory] {
                    let _ = self.act(None, handle, guest, Action::Read(place));
                }
            }
            let _ = self.act(None, handle, guest, Action::Kill);
        }
        let images = bindings
            .images
            .values()
            .filter_map(|cell| cell.get()?.as_deref());
        let images: Vec<&str> = images.collect();
        self.remove_snapshots(&images);
        self.history.faults.extend(self.site.keeps_template().err());
        let listed = self.list(None);
        let known: BTreeSet<&str> = bindings
            .known()
            .map(|(_, guest)| guest.id.as_str())
            .collect();
        let unknown = listed.into_keys().filter(|id| !known.contains(id.as_str()));
        let unknown: Vec<String> = unknown.collect();
        for id in &unknown {
            let guest = Guest {
                id: id.clone(),
                token: None,
            };
            let _ = self.send(|| self.site.act(&guest, Action::Kill));
        }
        let all: Vec<&str> = known
            .into_iter()
            .chain(unknown.iter().map(String::as_str))
            .collect();
        let leaks = self.site.leaks(&all, &images);
        self.history.faults.extend(leaks);
        self.history.unknown = unknown;
    }

    /// Removes all of them. A snapshot that is the base of another one is refused with a conflict.
    fn remove_snapshots(&mut self, images: &[&str]) {
        let mut left = images.to_vec();
        loop {
            let before = left.len();
            let mut conflicts = Vec::new();
            for image in left {
                match self.send(|| self.site.remove_snapshot(image)) {
                    (_, Ok(())) => {}
                    (_, Err(Miss::Conflict)) => conflicts.push(image),
                    (_, Err(miss)) => {
                        let fault = format!("snapshot {image} cannot be removed: {miss:?}");
                        self.history.faults.push(fault);
                    }
                }
            }
            left = conflicts;
            if left.is_empty() {
                return;
            }
            if left.len() == before {
                let fault = format!("snapshots {left:?} are each the base of another one");
                self.history.faults.push(fault);
                return;
            }
        }
    }
}

/// Refusals that the model can produce count as responses.
fn answered(outcome: Result<Reply, Miss>) -> Result<Reply, Miss> {
    match outcome {
        Err(Miss::NotFound) => Ok(Reply::NotFound),
        Err(Miss::Conflict) => Ok(Reply::Conflict),
        outcome => outcome,
    }
}
