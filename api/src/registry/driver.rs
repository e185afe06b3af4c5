//! The task: takes messages, performs what the lifecycle says on the pool, answers.
//!
//! It never waits for the pool itself: each piece of work is a task of its own whose end is one more event.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use model::SandboxId;
use netisolation::EventLog;
use pool::{CreateSpec, Ended, Found, Pool, PoolError, Recovered, SandboxState};
use tokio::{
    sync::mpsc,
    task::{JoinError, JoinSet},
};
use tracing::{error, info, warn};

use super::{
    Connected, Created, History, RegistryError, Route, View,
    book::{Book, Vm, end_of},
    lifecycle::{Change, Outcome, Phase, Rest, Verdict},
    message::{Message, NewLease, Reply, Wake},
    note::{Note, UnixMs},
    sample::Sample,
    signature::Tokens,
};

mod settle;
mod work;

use work::{By, Finished, Outbound, Owed, Waker};

/// Requests that may wait for the end of one sandbox's change.
const MAX_WAITING: usize = 1024;
/// Deadlines are wall time; a step of the wall clock is noticed after so long at the latest.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// The owner of all sandboxes.
pub(super) struct Driver {
    pool: Pool,
    book: Book,
    work: JoinSet<Finished>,
    /// Requests that wait for the end of a change.
    waiting: HashMap<SandboxId, Vec<Message>>,
    saving: HashMap<SandboxId, Saving>,
    /// Made anew when somebody asks after a sandbox came or went.
    tokens: Option<Tokens>,
    generation: u64,
    drains: Vec<Reply<()>>,
    draining: bool,
    /// What sandboxes' networks refused.
    refused: Option<EventLog>,
}

/// A note that is being written: the next one follows when it is on disk, so that they keep their order.
#[derive(Default)]
struct Saving {
    /// Answered when the note that is being written is on disk.
    now: Vec<Owed>,
    /// Answered when the one after it is.
    next: Vec<Owed>,
    /// There is one after it.
    again: bool,
}

impl Driver {
    /// An owner of what the pool found.
    pub(super) fn new(pool: Pool, recovered: Recovered, refused: Option<EventLog>) -> Self {
        let mut driver = Self {
            pool,
            book: Book::default(),
            work: JoinSet::new(),
            waiting: HashMap::new(),
            saving: HashMap::new(),
            tokens: None,
            generation: 0,
            drains: Vec::new(),
            draining: false,
            refused,
        };
        for (id, _, why) in recovered.lost {
            warn!(sandbox = %id, why, "a sandbox was lost while there was no server");
        }
        for found in recovered.alive {
            driver.adopt(found);
        }
        driver
    }

    /// Takes over a sandbox of the server before. One whose note does not read has no owner: it is ended.
    fn adopt(&mut self, found: Found) {
        let id = found.sandbox.id.clone();
        let rest = match found.state {
            SandboxState::Running | SandboxState::Changing => Rest::Running,
            SandboxState::Paused(mode) => Rest::Paused(mode),
        };
        match Note::from_text(&found.note) {
            Ok(note) => {
                let vm = self.vm_of(&found.sandbox);
                let view = View {
                    id: id.clone(),
                    note: Arc::new(note),
                    template: Arc::new(found.sandbox.template),
                    rest,
                };
                self.book.insert(view, vm);
                self.tell(&id, "taken over from the server before");
            }
            Err(why) => {
                error!(sandbox = %id, why = %why, "a sandbox's record does not read; it is ended");
                self.end_unowned(id);
            }
        }
    }

    /// Runs until the last handle is dropped; sandboxes stay as they are.
    pub(super) async fn run(
        mut self,
        mut inbox: mpsc::Receiver<Message>,
        mut ended: mpsc::Receiver<Ended>,
    ) {
        loop {
            self.expire();
            let nap = self.nap();
            tokio::select! {
                message = inbox.recv() => match message {
                    Some(message) => self.take(message),
                    None => return,
                },
                Some(finished) = self.work.join_next() => self.finished(finished),
                Some(ended) = ended.recv() => self.ended(&ended),
                () = tokio::time::sleep(nap) => {}
            }
        }
    }

    /// Until something becomes due.
    fn nap(&self) -> Duration {
        let Some(due) = self.book.next_due() else {
            return Duration::from_secs(3600);
        };
        Duration::from_millis(due.saturating_sub(now())).min(LONGEST_SLEEP)
    }

    /// Acts upon deadlines that have passed.
    fn expire(&mut self) {
        let now = now();
        for id in self.book.due(now) {
            let verdict = self.book.ask(&id, super::lifecycle::Ask::Expire, now);
            if let Verdict::Start(change) = verdict {
                info!(sandbox = %id, ?change, "the deadline has passed");
                self.tell(&id, "its deadline has passed");
                self.perform_unasked(id, change);
            }
        }
    }

    fn perform_unasked(&mut self, id: SandboxId, change: Change) {
        match change {
            Change::Pause(mode) => self.start_pause(id, mode, By::Deadline),
            Change::End => self.start_kill(id, By::Deadline),
            // No deadline starts these.
            Change::Resume | Change::Copy => {}
        }
    }

    /// A message: a question is answered, an ask is judged.
    fn take(&mut self, message: Message) {
        let Some((id, ask)) = message.asks() else {
            return self.answer(message);
        };
        let id = id.clone();
        if let Some(refusal) = self.refused_wake(&id, &message) {
            return message.refuse(refusal);
        }
        let verdict = self.book.ask(&id, ask, now());
        if let Some(refusal) = RegistryError::of(verdict, &id) {
            return message.refuse(refusal);
        }
        match verdict {
            Verdict::Wait => self.wait(id, message),
            _ => self.act(id, message, verdict),
        }
    }

    fn wait(&mut self, id: SandboxId, message: Message) {
        let waiting = self.waiting.entry(id.clone()).or_default();
        if waiting.len() < MAX_WAITING {
            waiting.push(message);
        } else {
            message.refuse(RegistryError::Crowded(id));
        }
    }

    /// What is asked of a paused sandbox that the lifecycle does not know of.
    fn refused_wake(&self, id: &SandboxId, message: &Message) -> Option<RegistryError> {
        let entry = self.book.get(id)?;
        let Phase::At(rest) = entry.phase() else {
            return None;
        };
        let memory = Rest::Paused(pool::PauseMode::Memory);
        match message {
            Message::Connect {
                wake: Wake::Resume { .. },
                ..
            } if rest == Rest::Running => Some(RegistryError::AlreadyRunning(id.clone())),
            Message::Connect {
                wake: Wake::ConnectColdBoot,
                ..
            } if rest == memory => Some(RegistryError::ColdBoot(id.clone())),
            Message::Route { .. } if rest == memory && entry.note.auto_resume => {
                let rest_s = entry.wakes.rest_s(now())?;
                let id = id.clone();
                Some(RegistryError::Resting { id, rest_s })
            }
            _ => None,
        }
    }

    /// An ask that was granted, or whose change is to be started.
    fn act(&mut self, id: SandboxId, message: Message, verdict: Verdict) {
        match message {
            Message::Connect {
                timeout_s,
                wake,
                reply,
                ..
            } => self.connect(id, timeout_s, wake, reply, verdict),
            Message::Route { reply, .. } => match verdict {
                Verdict::Start(_) => self.start_resume(id, None, Waker::Traffic(reply)),
                _ => {
                    let route = self.route(&id);
                    drop(reply.send(route.ok_or(super::RouteError::NotFound)));
                }
            },
            Message::SetTimeout {
                timeout_s, reply, ..
            } => {
                self.book.set_end(&id, end_of(now(), timeout_s), timeout_s);
                self.save(id, Some(Owed::Adjusted(reply)));
            }
            Message::Refresh {
                timeout_s, reply, ..
            } => {
                self.book.extend(&id, timeout_s, now());
                self.save(id, Some(Owed::Adjusted(reply)));
            }
            Message::SetNetwork {
                outbound,
                allow_internet_access,
                policy,
                reply,
                ..
            } => {
                let wanted = Outbound {
                    options: outbound,
                    allow_internet_access,
                };
                self.start_set_policy(id, policy, wanted, reply);
            }
            Message::Pause { mode, reply, .. } => self.start_pause(id, mode, By::Client(reply)),
            Message::Kill { reply, .. } => self.start_kill(id, By::Client(reply)),
            Message::Snapshot { names, reply, .. } => self.start_snapshot(id, names, reply),
            Message::Fork {
                count,
                timeout_s,
                reply,
                ..
            } => self.start_fork(id, count, timeout_s, reply),
            question => self.answer(question),
        }
    }

    fn connect(
        &mut self,
        id: SandboxId,
        timeout_s: Option<u32>,
        wake: Wake,
        reply: Reply<Connected>,
        verdict: Verdict,
    ) {
        if let Verdict::Start(_) = verdict {
            return self.start_resume(id, timeout_s, Waker::Client { wake, reply });
        }
        let moved = timeout_s.is_some_and(|timeout_s| self.book.extend(&id, timeout_s, now()));
        let Some(view) = self.view(&id) else {
            return drop(reply.send(Err(RegistryError::NotFound(id))));
        };
        let connected = Connected {
            view,
            resumed: false,
        };
        if moved {
            self.save(id, Some(Owed::Connected(Box::new(connected), reply)))
        } else {
            drop(reply.send(Ok(connected)))
        }
    }

    fn set_network(&mut self, id: &SandboxId, outbound: Outbound) {
        let Some(entry) = self.book.get_mut(id) else {
            return;
        };
        let note = Arc::make_mut(&mut entry.note);
        // How the sandbox is reached from outside is no part of an update.
        let kept = note.network.take().unwrap_or_default();
        note.network = Some(api_types::rest::NetworkConfig {
            allow_public_traffic: kept.allow_public_traffic,
            mask_request_host: kept.mask_request_host,
            https_ports: kept.https_ports,
            ..*outbound.options
        });
        note.allow_internet_access = outbound.allow_internet_access;
    }

    /// A question.
    fn answer(&mut self, message: Message) {
        match message {
            Message::Create { lease, reply } if !self.draining => self.start_create(*lease, reply),
            Message::Create { reply, .. } => drop(reply.send(Err(RegistryError::Draining))),
            Message::Get { id, reply } => {
                let view = self.view(&id);
                drop(reply.send(view.ok_or(RegistryError::NotFound(id))));
            }
            Message::List { reply } => {
                let views = self.book.iter().map(|(id, entry)| View {
                    id: id.clone(),
                    note: entry.note.clone(),
                    template: entry.template.clone(),
                    rest: entry.rest(),
                });
                drop(reply.send(Ok(views.collect())));
            }
            Message::History { id, reply } => {
                let history = self.history(&id);
                drop(reply.send(history.ok_or(RegistryError::NotFound(id))));
            }
            Message::Tokens { reply } => drop(reply.send(Ok(self.tokens()))),
            Message::Record { at, usage } => self.record(at, usage),
            Message::Drain { reply } => {
                self.draining = true;
                self.drains.push(reply);
                self.answer_drains();
            }
            other => other.refuse(RegistryError::Draining),
        }
    }

    fn view(&self, id: &SandboxId) -> Option<View> {
        let entry = self.book.get(id).filter(|entry| !entry.is_ending())?;
        Some(View {
            id: id.clone(),
            note: entry.note.clone(),
            template: entry.template.clone(),
            rest: entry.rest(),
        })
    }

    fn history(&self, id: &SandboxId) -> Option<History> {
        let view = self.view(id)?;
        let entry = self.book.get(id)?;
        Some(History {
            view,
            samples: entry.samples.iter().copied().collect(),
            events: entry.events.iter().cloned().collect(),
            console: (entry.vm.console.clone(), entry.vm.since),
            vsock: entry.vm.vsock.clone(),
        })
    }

    fn route(&self, id: &SandboxId) -> Option<Route> {
        let entry = self.book.get(id)?;
        Some(Route {
            id: id.clone(),
            vsock: entry.vm.vsock.clone(),
            traffic_token: entry.note.traffic_token.clone(),
            envd_token: entry.note.envd_token.clone(),
            mask_request_host: entry.note.mask_request_host().map(str::to_owned),
            generation: entry.vm.generation,
        })
    }

    fn tokens(&mut self) -> Tokens {
        let book = &self.book;
        let tokens = self.tokens.get_or_insert_with(|| {
            let with_token = book.iter().filter_map(|(id, entry)| {
                let token = entry.note.envd_token.clone()?;
                Some((id.clone(), token))
            });
            with_token.collect()
        });
        tokens.clone()
    }

    fn record(&mut self, at: UnixMs, usage: Vec<(SandboxId, pool::Usage)>) {
        for (id, usage) in usage {
            let Some(entry) = self.book.get_mut(&id) else {
                continue;
            };
            let since = entry.vm.since;
            let before = entry.samples.back().filter(|sample| sample.at >= since);
            let sample = Sample::after(before, at, usage, entry.template.vcpus);
            entry.sample(sample);
        }
    }

    fn vm_of(&mut self, sandbox: &pool::Sandbox) -> Vm {
        self.generation += 1;
        Vm {
            vsock: sandbox.vsock.clone(),
            console: sandbox.console.clone(),
            generation: self.generation,
            since: now(),
        }
    }

    fn tell(&mut self, id: &SandboxId, what: &str) {
        if let Some(entry) = self.book.get_mut(id) {
            entry.tell(now(), what.to_owned());
        }
    }

    fn answer_drains(&mut self) {
        if self.work.is_empty() {
            for reply in self.drains.drain(..) {
                drop(reply.send(Ok(())));
            }
        }
    }
}

/// The wall clock.
pub(super) fn now() -> UnixMs {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let ms = since.unwrap_or_default().as_millis();
    u64::try_from(ms).unwrap_or(u64::MAX)
}
