//! A model of `cube-api` and its pool: how a server handles sandboxes and their owner records. All decisions about
//! records and moves are made by this crate's functions.

use model::SandboxId;

use crate::{
    ClusterEvent, GiverStep, Holding, MoveHalt, Needs, NodeId, NodeState, NoteStep, Owned,
    OwnerChange, OwnerError, OwnerNote, OwnerState, ReclaimStep, RecordStep, Stamp, TakerNote,
    admission::{owned, owner_txn},
    engine::Input,
    giver,
    handle::{changed, input_after, inputs_before},
    keys::Key,
    place,
    store::{Answer, Fault, Request},
    taker,
};

use super::world::{HOME, HOSTS, Message, Truth, Waits, World, tagged, template};

/// A sandbox on a host's disk. Every change to it is durable at once.
#[derive(Clone, Debug)]
pub(super) struct Local {
    pub(super) note: Note,
    /// The record as this host last wrote or read it. `None`: the sandbox has none and cannot move.
    pub(super) owned: Option<Owned>,
    /// The stamp of files on the host's own disk.
    pub(super) stamp: Option<Stamp>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Note {
    Running,
    Paused,
    /// A first record may have been written. The sandbox is not resumed before the record has been read.
    Sharing,
    Offered {
        to: NodeId,
        epoch: u64,
        since: u64,
    },
    Incoming,
    Taking,
    Ending,
}

/// The purpose of a call to etcd.
#[derive(Clone, Debug)]
pub(super) enum Call {
    /// Read the record, then decide.
    Read { answer: Option<Holding> },
    Change {
        change: OwnerChange,
        next: Option<crate::Owner>,
    },
}

/// Time after which a giver asks for the outcome of its offer.
const PATIENCE_MS: u64 = 10_000;

impl World {
    /// The start of a process: reports the sandboxes on disk to the engine.
    pub(super) fn recover(&mut self, at: usize) {
        let host = &mut self.hosts[at];
        let mut held = Vec::new();
        for (id, local) in &mut host.disk {
            if local.note == Note::Running && !host.vms.contains(id) {
                // Rebooted, or killed between the note and the start of the VM.
                local.note = Note::Paused;
            }
            if let Some(Owned { owner, .. }) = &local.owned {
                held.push((id.clone(), owner.clone()));
            }
        }
        for (id, owner) in held {
            self.input(at, Input::Hold(id, owner, 0));
        }
    }

    /// One round of a server's background work.
    pub(super) fn serve(&mut self, at: usize) {
        let Some(process) = self.hosts[at].process.as_mut() else {
            return;
        };
        process.ticks += 1;
        if !process.ticks.is_multiple_of(4) {
            return;
        }
        self.serve_template(at);
        let draining = self.is_draining(at);
        let locals: Vec<SandboxId> = self.hosts[at].disk.keys().cloned().collect();
        for id in locals {
            self.serve_one(at, &id, draining);
        }
        self.collect_records(at);
        if self.draw(20) == 0 {
            self.take_over(at);
        }
    }

    /// The home asks whether the others see its new build, once it is in its own view. They copy it later.
    fn serve_template(&mut self, at: usize) {
        let build = self.hosts[HOME].build;
        if at != HOME {
            if self.hosts[at].build < build && self.draw(8) == 0 {
                self.hosts[at].build = build;
                self.publish(at);
            }
            return;
        }
        if self.sees(at, build)
            && let Some(process) = &self.hosts[at].process
        {
            for to in process.unseen.clone() {
                let to = self.hosts[to].id().clone();
                self.tell(at, &to, Message::DoYouSee { build });
            }
        }
    }

    /// Whether a host's view has a build of the home.
    fn sees(&self, at: usize, build: u64) -> bool {
        let home = self.hosts[HOME].id();
        let view = self.view(at);
        view.is_some_and(|view| {
            let tags = view.tags.get(&template());
            let tags = tags.and_then(|nodes| nodes.get(home));
            tags.is_some_and(|tags| tags.builds.values().eq([&build.to_string()]))
        })
    }

    /// The home has rebuilt the template.
    pub(super) fn build(&mut self) {
        let host = &mut self.hosts[HOME];
        if let Some(process) = &mut host.process {
            host.build += 1;
            process.unseen = (0..HOSTS).filter(|at| *at != HOME).collect();
            self.publish(HOME);
        }
    }

    fn serve_one(&mut self, at: usize, id: &SandboxId, draining: bool) {
        let Some(local) = self.hosts[at].disk.get(id).cloned() else {
            return;
        };
        if self.is_busy(at, id) {
            return;
        }
        let networked = self.truths.get(id).is_some_and(|truth| truth.networked);
        match (&local.owned, &local.note) {
            (None, Note::Running) if draining => self.pause_here(at, id),
            (None, Note::Paused) if self.wants(at, id) && !draining => self.resume_here(at, id),
            (None, Note::Paused) if draining || networked => {
                self.set_note(at, id, Note::Sharing);
                self.change(at, id, None, OwnerChange::Share);
            }
            (None, Note::Running | Note::Paused) => {}
            // A taker's note without a record.
            (None, _) | (Some(_), _) => {
                if draining && local.note == Note::Running {
                    self.pause_here(at, id);
                }
                match self.seen(at, id) {
                    Some(found) => self.decide(at, id, Some(found), None),
                    None => self.read(at, id, None),
                }
            }
        }
    }

    /// The record in the node's view, which may be older than etcd's. A server may base a take, a start or an offer on
    /// it, because the compare-and-swap decides. Recovery always reads from etcd.
    fn seen(&mut self, at: usize, id: &SandboxId) -> Option<Owned> {
        if self.draw(2) == 0 {
            return None;
        }
        let note = self.hosts[at].disk.get(id)?.note.clone();
        let found = self.view(at)?.owners.get(id)?.clone();
        let this = self.hosts[at].id();
        let may = match note {
            Note::Incoming => found.owner.offered_to.as_ref() == Some(this),
            Note::Paused => {
                // A record that says "running" permits a resume without a change, so it is read from etcd.
                found.owner.node == *this && found.owner.state == OwnerState::Paused
            }
            _ => false,
        };
        may.then_some(found)
    }

    /// Decides by a linearizable read of the record.
    fn decide(&mut self, at: usize, id: &SandboxId, found: Option<Owned>, answer: Option<Holding>) {
        let Some(local) = self.hosts[at].disk.get(id).cloned() else {
            return;
        };
        let this = self.hosts[at].id().clone();
        let mine = found.as_ref().is_some_and(|found| found.owner.node == this);
        match local.note {
            Note::Offered { to, epoch, since } => {
                self.decide_offer(at, id, &to, epoch, since, found, answer);
            }
            Note::Incoming | Note::Taking => self.decide_take(at, id, found),
            // It was taken over and has ended since.
            Note::Sharing | Note::Paused if !self.has_files(id) => {
                if mine {
                    self.set_note(at, id, Note::Ending);
                    self.change(at, id, found.as_ref(), OwnerChange::End);
                } else {
                    self.discard(at, id);
                }
            }
            Note::Sharing => match found {
                None => self.change(at, id, None, OwnerChange::Share),
                Some(_) if mine => {
                    self.adopt(at, id, found);
                    self.set_note(at, id, Note::Paused);
                }
                Some(_) => self.discard(at, id),
            },
            Note::Ending => match found {
                Some(_) if mine => self.change(at, id, found.as_ref(), OwnerChange::End),
                _ => self.discard(at, id),
            },
            Note::Running if mine => {}
            Note::Paused if mine => self.decide_paused(at, id, found),
            Note::Paused => self.decide_forgotten(at, id, found),
            // The engine reports it as superseded or rewrites it.
            Note::Running => {}
        }
    }

    fn decide_paused(&mut self, at: usize, id: &SandboxId, found: Option<Owned>) {
        let Some(note) = self.owner_note(at, id) else {
            return;
        };
        let this = self.hosts[at].id().clone();
        let draining = self.is_draining(at);
        let wanted = if self.wants(at, id) && !draining {
            OwnerState::Running
        } else {
            OwnerState::Paused
        };
        match note.record(&this, wanted, found.as_ref()) {
            Ok(RecordStep::Change(change)) => self.change(at, id, found.as_ref(), change),
            Ok(RecordStep::Done(owned)) if wanted == OwnerState::Running => {
                self.started(at, id, owned);
            }
            Ok(RecordStep::Done(owned)) if draining => {
                if let Some(to) = self.target(at) {
                    self.note_offer(at, id, &to, owned.owner.epoch);
                    self.change(at, id, Some(&owned), OwnerChange::Offer(to));
                }
            }
            Ok(RecordStep::Done(_)) => {}
            // An offer whose response was lost but that was made.
            Err(MoveHalt::Unsettled(to)) => {
                let epoch = found.map_or(0, |found| found.owner.epoch);
                self.note_offer(at, id, &to, epoch);
            }
            Err(MoveHalt::Superseded | MoveHalt::Stale) => {}
        }
    }

    fn note_offer(&mut self, at: usize, id: &SandboxId, to: &NodeId, epoch: u64) {
        let (to, since) = (to.clone(), self.now);
        self.set_note(at, id, Note::Offered { to, epoch, since });
    }

    /// Handles a record that is missing or names another node.
    fn decide_forgotten(&mut self, at: usize, id: &SandboxId, found: Option<Owned>) {
        let Some(note) = self.owner_note(at, id) else {
            return;
        };
        let owner = found.as_ref().map(|found| &found.owner);
        match note.reclaim(self.hosts[at].id(), owner) {
            Ok(ReclaimStep::Keep) => {}
            Ok(ReclaimStep::Reassert(change)) => self.change(at, id, found.as_ref(), change),
            // A server keeps files with a later stamp. Here they would be found as a second copy.
            Ok(ReclaimStep::Discard(_)) | Err(_) => self.discard(at, id),
        }
    }

    /// The note that a server keeps about a sandbox.
    fn owner_note(&self, at: usize, id: &SandboxId) -> Option<OwnerNote> {
        let local = self.hosts[at].disk.get(id)?;
        let step = match &local.note {
            Note::Offered { to, .. } => NoteStep::Offered { to: to.clone() },
            Note::Sharing => NoteStep::Sharing,
            Note::Running | Note::Paused | Note::Incoming | Note::Taking | Note::Ending => {
                NoteStep::Held
            }
        };
        let mut note = match &local.owned {
            Some(owned) => OwnerNote::held(owned, self.stamp(at, id), None),
            None => OwnerNote::sharing(),
        };
        note.step = step;
        Some(note)
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "the note, the record and the answer"
    )]
    fn decide_offer(
        &mut self,
        at: usize,
        id: &SandboxId,
        to: &NodeId,
        epoch: u64,
        since: u64,
        found: Option<Owned>,
        answer: Option<Holding>,
    ) {
        let this = self.hosts[at].id().clone();
        let owner = found.as_ref().map(|found| &found.owner);
        match giver(&this, to, epoch, owner, answer) {
            GiverStep::Ask
                if self.now < since + PATIENCE_MS
                    && owner.is_none_or(|owner| owner.node == this) =>
            {
                let stamp = self.stamp(at, id);
                let sandbox = id.clone();
                self.tell(at, to, Message::Files { sandbox, stamp });
            }
            GiverStep::Ask => {
                let sandbox = id.clone();
                self.tell(at, to, Message::HaveYou { sandbox, epoch });
            }
            GiverStep::Wait => {}
            GiverStep::Withdraw => {
                self.change(at, id, found.as_ref(), OwnerChange::Withdraw);
            }
            GiverStep::Reassert => {
                let state = OwnerState::Paused;
                let change = OwnerChange::Reassert { epoch, state };
                self.change(at, id, found.as_ref(), change);
            }
            GiverStep::Keep => {
                self.set_note(at, id, Note::Paused);
                self.adopt(at, id, found);
            }
            GiverStep::Discard => {
                if found.is_none() && !self.is_elsewhere(at, id) {
                    self.may_be_lost(id);
                }
                self.discard(at, id);
            }
        }
    }

    fn decide_take(&mut self, at: usize, id: &SandboxId, found: Option<Owned>) {
        let this = self.hosts[at].id().clone();
        let Some(found) = found else {
            self.discard(at, id);
            return;
        };
        let owner = &found.owner;
        if owner.node == this {
            // Taken, but the response was lost.
            self.taken(at, id, found);
            return;
        }
        let is_networked = self.truths.get(id).is_some_and(|truth| truth.networked);
        let offered = owner.offered_to.as_ref() == Some(&this);
        let stamp = self.stamp(at, id);
        let permitted = Stamp::permits(stamp.as_ref(), owner);
        let view = self.view(at);
        let is_orphan = view.is_some_and(|view| !view.nodes.contains_key(&owner.node));
        let may = offered || (is_networked && is_orphan && owner.state == OwnerState::Paused);
        // etcd may have been restored from a backup that has a record of an ended sandbox.
        let may = may && self.has_files(id);
        if may && permitted {
            self.set_note(at, id, Note::Taking);
            self.change(at, id, Some(&found), OwnerChange::Take);
        } else {
            self.discard(at, id);
        }
    }

    /// Files on shared storage are removed when their sandbox ends.
    fn has_files(&self, id: &SandboxId) -> bool {
        let truth = self.truths.get(id);
        truth.is_some_and(|truth| !truth.networked || !truth.ended)
    }

    fn taken(&mut self, at: usize, id: &SandboxId, found: Owned) {
        let giver = self.hosts.iter().position(|host| {
            let local = host.disk.get(id);
            local.is_some_and(|local| matches!(local.note, Note::Offered { .. }))
        });
        // An offer has the previous epoch.
        let epoch = found.owner.epoch.saturating_sub(1);
        if self.stamp_files(at, id, &found.owner) {
            self.adopt(at, id, Some(found));
            self.set_note(at, id, Note::Paused);
            match giver {
                Some(giver) if giver != at => {
                    self.summary.moved += 1;
                    let to = self.hosts[giver].id().clone();
                    let sandbox = id.clone();
                    let holding = Holding::Taken;
                    let answer = Message::Have {
                        sandbox,
                        epoch,
                        holding,
                    };
                    self.tell(at, &to, answer);
                }
                _ => self.summary.taken_over += 1,
            }
        } else {
            // Another node has used this epoch, so the record belongs to an older history. That node rewrites it.
            self.discard(at, id);
        }
    }

    // Calls.

    fn read(&mut self, at: usize, id: &SandboxId, answer: Option<Holding>) {
        let request = Request::Get(Key::Owner(id.clone()));
        self.call(at, id, Call::Read { answer }, request);
    }

    fn change(&mut self, at: usize, id: &SandboxId, found: Option<&Owned>, change: OwnerChange) {
        let this = self.hosts[at].id().clone();
        let Ok((txn, next)) = owner_txn(&this, id, found, &change) else {
            return;
        };
        for input in inputs_before(id, found, next.as_ref()) {
            self.input(at, input);
        }
        self.call(at, id, Call::Change { change, next }, Request::Txn(txn));
    }

    fn call(&mut self, at: usize, id: &SandboxId, call: Call, request: Request) {
        let Some(process) = self.hosts[at].process.as_mut() else {
            return;
        };
        let number = self.requests + 1;
        process.calls.insert(number, (id.clone(), call));
        process.busy.insert(id.clone());
        let process = process.number;
        self.send(at, process, Waits::Server(number), request);
    }

    pub(super) fn called(&mut self, at: usize, call: u64, answer: Result<Answer, Fault>) {
        let Some(process) = self.hosts[at].process.as_mut() else {
            return;
        };
        let Some((id, call)) = process.calls.remove(&call) else {
            return;
        };
        process.busy.remove(&id);
        match call {
            Call::Read { answer: holding } => {
                if let Ok(Answer::Got { entry, .. }) = answer
                    && let Ok(found) = owned(entry.as_ref())
                {
                    self.decide(at, &id, found, holding);
                }
            }
            Call::Change { change, next } => {
                let outcome = changed(answer, next);
                self.input(at, input_after(&id, &outcome));
                self.note(|| format!("n{at} {id} {change:?}: {outcome:?}"));
                self.changed(at, &id, &change, outcome);
            }
        }
    }

    fn changed(
        &mut self,
        at: usize,
        id: &SandboxId,
        change: &OwnerChange,
        outcome: Result<Option<Owned>, OwnerError>,
    ) {
        if !self.hosts[at].disk.contains_key(id) {
            return;
        }
        match (change, outcome) {
            (OwnerChange::End, Ok(_)) => {
                self.ended(id);
                self.discard(at, id);
            }
            (_, Ok(None) | Err(_)) => {}
            (OwnerChange::Take, Ok(Some(owned))) => self.taken(at, id, owned),
            (OwnerChange::Share, Ok(Some(owned))) => {
                self.save(at, id, owned);
                self.set_note(at, id, Note::Paused);
            }
            (OwnerChange::Start, Ok(Some(owned))) => self.started(at, id, owned),
            (OwnerChange::Withdraw, Ok(Some(owned))) => {
                self.summary.withdrawn += 1;
                self.save(at, id, owned);
                self.set_note(at, id, Note::Paused);
            }
            (OwnerChange::Reassert { .. }, Ok(Some(owned))) => {
                self.save(at, id, owned);
                self.set_note(at, id, Note::Paused);
            }
            (_, Ok(Some(owned))) => self.save(at, id, owned),
        }
    }

    fn started(&mut self, at: usize, id: &SandboxId, owned: Owned) {
        let owner = owned.owner.clone();
        self.save(at, id, owned);
        if self.stamp_files(at, id, &owner) {
            self.resume_here(at, id);
        }
    }

    // Messages between servers.

    pub(super) fn tell(&mut self, from: usize, to: &NodeId, message: Message) {
        if let Some(to) = self.at(to) {
            let delay = self.delay();
            self.later(delay, super::world::Event::Message { from, to, message });
        }
    }

    pub(super) fn message(&mut self, from: usize, to: usize, message: Message) {
        let lost = self.cut.contains(&(from, to)) || self.hosts[to].process.is_none();
        if lost {
            return;
        }
        let event = super::world::Event::Message { from, to, message };
        let Some(super::world::Event::Message { message, .. }) = self.postpone(to, event) else {
            return;
        };
        let sender = self.hosts[from].id().clone();
        match message {
            Message::Create { id_bytes } => self.create(to, &sender, id_bytes),
            Message::Created { sandbox } => {
                if let Some(truth) = self.truths.get_mut(&sandbox) {
                    truth.acknowledged = true;
                }
            }
            Message::Files { sandbox, stamp } => {
                let local = Local {
                    note: Note::Incoming,
                    owned: None,
                    stamp,
                };
                self.hosts[to].disk.entry(sandbox.clone()).or_insert(local);
                // A taker does not wait for its next round.
                let draining = self.is_draining(to);
                self.serve_one(to, &sandbox, draining);
            }
            Message::HaveYou { sandbox, epoch } => {
                let holding = self.holding(to, &sandbox, epoch);
                let answer = Message::Have {
                    sandbox,
                    epoch,
                    holding,
                };
                self.tell(to, &sender, answer);
            }
            Message::Have {
                sandbox,
                epoch,
                holding,
            } => {
                if self.has_offered(to, &sandbox, epoch) && !self.is_busy(to, &sandbox) {
                    self.read(to, &sandbox, Some(holding));
                }
            }
            Message::DoYouSee { build } => {
                if self.sees(to, build)
                    && let Some(process) = &mut self.hosts[to].process
                {
                    process.confirmed = build;
                    self.tell(to, &sender, Message::Seen { build });
                }
            }
            Message::Seen { build } if build == self.hosts[HOME].build => {
                if let Some(process) = &mut self.hosts[to].process
                    && process.unseen.remove(&from)
                    && process.unseen.is_empty()
                {
                    self.summary.seen += 1;
                }
            }
            Message::Seen { .. } => {}
        }
    }

    /// A response belongs to one request, and thus to one offer.
    fn has_offered(&self, at: usize, id: &SandboxId, epoch: u64) -> bool {
        let local = self.hosts[at].disk.get(id);
        local.is_some_and(
            |local| matches!(local.note, Note::Offered { epoch: offered, .. } if offered == epoch),
        )
    }

    fn holding(&mut self, at: usize, id: &SandboxId, offered: u64) -> Holding {
        let this = self.hosts[at].id();
        let local = self.hosts[at].disk.get(id);
        let kept = self.owner_note(at, id);
        let is_taken = kept.is_some_and(|note| note.is_taken(this, offered));
        let note = match local.map(|local| &local.note) {
            None => TakerNote::Absent,
            // A take may be in flight to etcd as soon as it is decided.
            Some(Note::Incoming) if self.is_busy(at, id) => TakerNote::Taking,
            Some(Note::Incoming) => TakerNote::Incoming,
            Some(Note::Taking) => TakerNote::Taking,
            // Files from before the offer must be removed first, by a decision that is not made yet.
            Some(_) if !is_taken => TakerNote::Taking,
            Some(_) => TakerNote::Held,
        };
        if note == TakerNote::Incoming {
            self.discard(at, id);
        }
        taker(note)
    }

    fn create(&mut self, at: usize, client: &NodeId, id_bytes: [u8; 14]) {
        // The pool decides: either it has the template, or it refuses.
        if !self.hosts[at].has_template || self.is_draining(at) {
            self.summary.refused += 1;
            return;
        }
        if self.is_outdated(at) {
            self.summary.outdated += 1;
            return;
        }
        let id = self.home_key.id(self.hosts[at].slot, id_bytes);
        if self.truths.contains_key(&id) {
            return;
        }
        let networked = self.draw(2) == 0;
        let truth = Truth {
            acknowledged: false,
            killed: false,
            ended: false,
            lost: false,
            networked,
            stamp: None,
        };
        self.truths.insert(id.clone(), truth);
        let local = Local {
            note: Note::Running,
            owned: None,
            stamp: None,
        };
        self.hosts[at].disk.insert(id.clone(), local);
        self.hosts[at].vms.insert(id.clone());
        self.summary.created += 1;
        self.tell(at, client, Message::Created { sandbox: id });
    }

    /// Whether a host's view forbids its copy of the template.
    fn is_outdated(&mut self, at: usize) -> bool {
        let host = &self.hosts[at];
        let (Some(view), Some(process)) = (self.view(at), &host.process) else {
            return true;
        };
        let is_outdated = view.is_outdated(host.id(), &tagged(host.build));
        // A home without a lease has no record, and etcd may be restored from a backup with an older one.
        let is_known = view.tags.contains_key(&template()) && self.summary.restores == 0;
        if !is_outdated && is_known && at != HOME && host.build < process.confirmed {
            let detail = format!(
                "n{at} uses {}, and has confirmed {}",
                host.build, process.confirmed
            );
            self.fail("no former build", detail);
        }
        is_outdated
    }

    // Parts.

    pub(super) fn cluster_event(&mut self, at: usize, event: ClusterEvent) {
        self.note(|| format!("n{at} {event:?}"));
        match event {
            ClusterEvent::Superseded { sandbox, .. } => {
                self.summary.superseded += 1;
                let local = self.hosts[at].disk.get(&sandbox);
                if !local.is_some_and(|local| matches!(local.note, Note::Offered { .. })) {
                    self.discard(at, &sandbox);
                }
            }
            ClusterEvent::HistoryLost { .. } => self.summary.histories_lost += 1,
            _ => {}
        }
    }

    fn pause_here(&mut self, at: usize, id: &SandboxId) {
        self.hosts[at].vms.remove(id);
        self.set_note(at, id, Note::Paused);
    }

    fn resume_here(&mut self, at: usize, id: &SandboxId) {
        self.set_note(at, id, Note::Running);
        self.hosts[at].vms.insert(id.clone());
        if let Some(process) = self.hosts[at].process.as_mut() {
            process.wanted.remove(id);
        }
        self.summary.resumed += 1;
    }

    pub(super) fn client_pause(&mut self, at: usize, id: &SandboxId) {
        let local = self.hosts[at].disk.get(id);
        if local.is_some_and(|local| local.note == Note::Running) && !self.is_busy(at, id) {
            self.pause_here(at, id);
        }
    }

    pub(super) fn client_kill(&mut self, at: usize, id: &SandboxId) {
        let Some(local) = self.hosts[at].disk.get(id) else {
            return;
        };
        if !matches!(local.note, Note::Running | Note::Paused) || self.is_busy(at, id) {
            return;
        }
        if let Some(truth) = self.truths.get_mut(id) {
            truth.killed = true;
        }
        self.hosts[at].vms.remove(id);
        if self.hosts[at]
            .disk
            .get(id)
            .is_some_and(|local| local.owned.is_some())
        {
            self.set_note(at, id, Note::Ending);
        } else {
            self.ended(id);
            self.discard(at, id);
        }
    }

    /// Only now does the client get its response.
    fn ended(&mut self, id: &SandboxId) {
        if let Some(truth) = self.truths.get_mut(id) {
            truth.ended = truth.killed;
        }
    }

    /// Ends the sandbox on this host.
    fn discard(&mut self, at: usize, id: &SandboxId) {
        self.hosts[at].vms.remove(id);
        self.hosts[at].disk.remove(id);
        self.input(at, Input::Release(id.clone()));
    }

    fn set_note(&mut self, at: usize, id: &SandboxId, note: Note) {
        if let Some(local) = self.hosts[at].disk.get_mut(id) {
            if let (Note::Offered { to, .. }, Some(owned)) = (&note, local.owned.as_mut()) {
                // After a crash, nothing may be rewritten before the taker has been asked.
                owned.owner.offered_to = Some(to.clone());
            }
            local.note = note;
        }
    }

    fn save(&mut self, at: usize, id: &SandboxId, owned: Owned) {
        if let Some(local) = self.hosts[at].disk.get_mut(id) {
            local.owned = Some(owned);
        }
    }

    /// Adopts a record that was read.
    fn adopt(&mut self, at: usize, id: &SandboxId, found: Option<Owned>) {
        if let Some(found) = found {
            let Owned { owner, revision } = found.clone();
            self.save(at, id, found);
            self.input(at, Input::Hold(id.clone(), owner, revision));
        }
    }

    fn stamp(&self, at: usize, id: &SandboxId) -> Option<Stamp> {
        match self.truths.get(id) {
            Some(truth) if truth.networked => truth.stamp.clone(),
            _ => self.hosts[at].disk.get(id)?.stamp.clone(),
        }
    }

    fn stamp_files(&mut self, at: usize, id: &SandboxId, owner: &crate::Owner) -> bool {
        if !Stamp::permits(self.stamp(at, id).as_ref(), owner) {
            return false;
        }
        let stamp = Some(owner.stamp());
        match self.truths.get_mut(id) {
            Some(truth) if truth.networked => truth.stamp = stamp,
            _ => {
                if let Some(local) = self.hosts[at].disk.get_mut(id) {
                    local.stamp = stamp;
                }
            }
        }
        true
    }

    fn is_busy(&self, at: usize, id: &SandboxId) -> bool {
        let process = self.hosts[at].process.as_ref();
        process.is_some_and(|process| process.busy.contains(id))
    }

    fn wants(&self, at: usize, id: &SandboxId) -> bool {
        let process = self.hosts[at].process.as_ref();
        process.is_some_and(|process| process.wanted.contains(id))
    }

    pub(super) fn is_draining(&self, at: usize) -> bool {
        let view = self.view(at);
        view.is_some_and(|view| view.state(self.hosts[at].id()) == NodeState::Draining)
    }

    /// Whether another host can continue the sandbox.
    fn is_elsewhere(&self, at: usize, id: &SandboxId) -> bool {
        (0..self.hosts.len()).any(|other| {
            let owned = self.hosts[other]
                .disk
                .get(id)
                .and_then(|l| l.owned.as_ref());
            let stamp = self.stamp(other, id);
            other != at && owned.is_some_and(|owned| Stamp::permits(stamp.as_ref(), &owned.owner))
        })
    }

    /// Marks a paused sandbox whose record etcd lost while the outcome of an offer was unknown to its giver.
    fn may_be_lost(&mut self, id: &SandboxId) {
        if self.summary.restores > 0
            && let Some(truth) = self.truths.get_mut(id)
        {
            truth.lost = true;
        }
    }

    /// A target for a sandbox that leaves this node.
    fn target(&mut self, at: usize) -> Option<NodeId> {
        let view = self.view(at)?;
        let needs = needs(self.hosts[at].id());
        let random = self.draw(u64::MAX);
        let order = place(&view, &needs, |_| 0, random);
        order.first().map(|candidate| candidate.node.clone())
    }

    /// Deletes records that name this host but whose sandboxes are not on it.
    fn collect_records(&mut self, at: usize) {
        let Some(view) = self.view(at) else {
            return;
        };
        let this = self.hosts[at].id();
        let disk = &self.hosts[at].disk;
        let stray = view.owners.iter().find(|(id, owned)| {
            owned.owner.node == *this && !disk.contains_key(*id) && !self.is_busy(at, id)
        });
        if let Some((id, owned)) = stray {
            let (id, owned) = (id.clone(), owned.clone());
            self.change(at, &id, Some(&owned), OwnerChange::End);
        }
    }

    /// Takes a paused sandbox of a node without a lease, if its storage is reachable.
    fn take_over(&mut self, at: usize) {
        let Some(view) = self.view(at) else {
            return;
        };
        let this = self.hosts[at].id();
        let orphan = view.owners.iter().find(|(id, owned)| {
            let is_networked = self.truths.get(*id).is_some_and(|truth| truth.networked);
            is_networked
                && owned.owner.node != *this
                && owned.owner.state == OwnerState::Paused
                && !view.nodes.contains_key(&owned.owner.node)
                && !self.hosts[at].disk.contains_key(*id)
        });
        if let Some((id, _)) = orphan {
            let local = Local {
                note: Note::Incoming,
                owned: None,
                stamp: None,
            };
            let id = id.clone();
            self.hosts[at].disk.insert(id, local);
        }
    }
}

pub(super) fn needs(except: &NodeId) -> Needs {
    Needs {
        template: template(),
        content: None,
        memory_mib: 256,
        platform: None,
        features: std::collections::BTreeSet::new(),
        except: std::collections::BTreeSet::from([except.clone()]),
    }
}
