//! Hosts, messages and time.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use model::{Platform, SandboxId};

use crate::{
    CpuKind, HomeKey, HomeSlot, Load, MemberSigner, Node, NodeId, NodeState, Replica, Stamp,
    Tagged, Tags, TemplateId,
    engine::{Effect, Engine, Input, Timing, Token},
    keys::{self, Founded, Key},
    moves::Holding,
    placement::next_random,
    roll::tests::{applicant, signer},
    store::{Answer, Fault, Request, Txn, Watched, Write},
};

use super::{
    etcd::Etcd,
    server::{Call, Local},
};

pub(super) const HOSTS: usize = 3;
/// Duration of operations and faults, and of the time without faults that follows.
const TROUBLE_MS: u64 = 120_000;
const RECOVERY_MS: u64 = 120_000;
const LEASE_MS: u64 = 10_000;
/// A driver's deadline for a request.
const DEADLINE_MS: u64 = 3000;
pub(super) const TEMPLATE: &str = "base";
const TAG: &str = "default";
/// The host that builds the template.
pub(super) const HOME: usize = 0;

#[derive(Debug)]
pub(super) struct Failure {
    pub(super) property: &'static str,
    pub(super) detail: String,
}

/// Statistics of a run.
#[derive(Clone, Debug, Default)]
pub(super) struct Summary {
    pub(super) created: u64,
    pub(super) refused: u64,
    pub(super) resumed: u64,
    pub(super) moved: u64,
    /// Builds seen by all hosts, and creates refused by a host with an older build.
    pub(super) seen: u64,
    pub(super) outdated: u64,
    pub(super) taken_over: u64,
    pub(super) withdrawn: u64,
    pub(super) superseded: u64,
    pub(super) crashes: u64,
    pub(super) stops: u64,
    pub(super) restores: u64,
    pub(super) compactions: u64,
    pub(super) leases_lost: u64,
    pub(super) histories_lost: u64,
}

impl Summary {
    pub(super) fn add(&mut self, other: &Self) {
        self.created += other.created;
        self.refused += other.refused;
        self.resumed += other.resumed;
        self.moved += other.moved;
        self.seen += other.seen;
        self.outdated += other.outdated;
        self.taken_over += other.taken_over;
        self.withdrawn += other.withdrawn;
        self.superseded += other.superseded;
        self.crashes += other.crashes;
        self.stops += other.stops;
        self.restores += other.restores;
        self.compactions += other.compactions;
        self.leases_lost += other.leases_lost;
        self.histories_lost += other.histories_lost;
    }
}

/// The true state of a sandbox, according to its client and the storage.
#[derive(Clone, Debug)]
pub(super) struct Truth {
    pub(super) acknowledged: bool,
    /// A kill was requested. The sandbox may or may not exist.
    pub(super) killed: bool,
    /// A kill was acknowledged.
    pub(super) ended: bool,
    /// It ran on a host that was rebooted.
    pub(super) lost: bool,
    /// While it is paused, its files are on storage that all hosts can reach.
    pub(super) networked: bool,
    /// The stamps of these files.
    pub(super) stamp: Option<Stamp>,
}

/// One delivery.
#[derive(Debug)]
pub(super) enum Event {
    /// A request arrives at etcd.
    Arrive {
        from: Source,
        request: Request,
    },
    /// A response arrives at a process, or its deadline passes.
    Answer {
        from: Source,
        answer: Result<Answer, Fault>,
    },
    WatchStart {
        host: usize,
        process: u64,
        generation: u64,
        from: u64,
    },
    WatchMore {
        host: usize,
        process: u64,
        generation: u64,
    },
    WatchEnd {
        host: usize,
        process: u64,
        generation: u64,
    },
    Tick {
        host: usize,
        process: u64,
    },
    Message {
        from: usize,
        to: usize,
        message: Message,
    },
    Client,
    Fault,
    Start {
        host: usize,
    },
    EtcdUp,
    Heal {
        host: usize,
    },
    HealPair {
        a: usize,
        b: usize,
    },
}

/// The process, and the part of it that waits for a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Source {
    pub(super) host: usize,
    pub(super) process: u64,
    pub(super) waits: Waits,
    /// Unique among requests.
    pub(super) number: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Waits {
    Engine(Token),
    Server(u64),
}

/// A message between servers.
#[derive(Clone, Debug)]
pub(super) enum Message {
    Create {
        id_bytes: [u8; 14],
    },
    Created {
        sandbox: SandboxId,
    },
    Files {
        sandbox: SandboxId,
        stamp: Option<Stamp>,
    },
    HaveYou {
        sandbox: SandboxId,
        /// Epoch of the offer, as in the response.
        epoch: u64,
    },
    Have {
        sandbox: SandboxId,
        epoch: u64,
        holding: Holding,
    },
    /// From the template's home: which build it has published.
    DoYouSee {
        build: u64,
    },
    Seen {
        build: u64,
    },
}

pub(super) struct WatchState {
    pub(super) generation: u64,
    /// `None` until it has started.
    pub(super) next: Option<u64>,
    /// Whether changes are in flight.
    is_coming: bool,
}

/// A running server.
pub(super) struct Process {
    pub(super) number: u64,
    pub(super) engine: Engine,
    pub(super) watch: Option<WatchState>,
    pub(super) calls: BTreeMap<u64, (SandboxId, Call)>,
    /// Sandboxes with a call or a request in flight.
    pub(super) busy: BTreeSet<SandboxId>,
    /// Sandboxes that a client wants resumed.
    pub(super) wanted: BTreeSet<SandboxId>,
    /// On the template's home: hosts that have not seen its new build.
    pub(super) unseen: BTreeSet<usize>,
    /// The last build that this process has confirmed.
    pub(super) confirmed: u64,
    pub(super) ticks: u64,
}

/// State that survives the process and, except for VMs, a reboot.
pub(super) struct Host {
    pub(super) node: Node,
    pub(super) slot: HomeSlot,
    pub(super) process: Option<Process>,
    pub(super) disk: BTreeMap<SandboxId, Local>,
    pub(super) vms: BTreeSet<SandboxId>,
    pub(super) has_template: bool,
    /// Build of the template. The first host is the home: its build is the newest.
    pub(super) build: u64,
    /// The process receives nothing before this time.
    pub(super) stopped_until: u64,
    pub(super) clock_offset: u64,
    pub(super) etcd_cut: bool,
    pub(super) boots: u64,
}

pub(super) struct World {
    pub(super) now: u64,
    random: u64,
    trace: bool,
    /// Periodic lists hide errors of the watch. Without them, an older state of etcd goes unnoticed if it has caught up
    /// in between. Half of the seeds therefore have lists, and the other half have no restores.
    pub(super) has_lists: bool,
    queue: BTreeMap<(u64, u64), Event>,
    events: u64,
    pub(super) etcd: Etcd,
    pub(super) etcd_up: bool,
    pub(super) backup: Option<Etcd>,
    pub(super) hosts: Vec<Host>,
    pub(super) cut: BTreeSet<(usize, usize)>,
    pub(super) answered: BTreeSet<u64>,
    pub(super) truths: BTreeMap<SandboxId, Truth>,
    pub(super) home_key: HomeKey,
    pub(super) signer: MemberSigner,
    pub(super) processes: u64,
    pub(super) requests: u64,
    pub(super) summary: Summary,
    pub(super) failure: Option<Failure>,
}

impl World {
    pub(super) fn new(seed: u64, trace: bool) -> Self {
        let mut world = Self {
            now: 1000,
            random: seed.wrapping_mul(0x5851_f42d_4c95_7f2d),
            trace,
            has_lists: seed.is_multiple_of(2),
            queue: BTreeMap::new(),
            events: 0,
            etcd: Etcd::new(),
            etcd_up: true,
            backup: None,
            hosts: (0..HOSTS).map(host).collect(),
            cut: BTreeSet::new(),
            answered: BTreeSet::new(),
            truths: BTreeMap::new(),
            home_key: HomeKey::new(&[9; 32]),
            signer: signer(),
            processes: 0,
            requests: 0,
            summary: Summary::default(),
            failure: None,
        };
        world.found();
        for at in 0..HOSTS {
            world.later(at as u64 * 50, Event::Start { host: at });
        }
        world.later(3000, Event::Client);
        world.later(8000, Event::Fault);
        world
    }

    /// The cluster and its members, as `cube cluster init` and `join` write them.
    fn found(&mut self) {
        let format = Founded::FORMAT;
        let mut then = vec![put(Key::Cluster, keys::encode(&Founded { format }))];
        for host in &self.hosts {
            let applicant = applicant(host.node.id.as_str(), &host.node.identity);
            let member = self.signer.member(&applicant, host.slot);
            then.push(put(
                Key::Member(host.node.id.clone()),
                keys::encode(&member),
            ));
        }
        let txn = Txn {
            when: Vec::new(),
            then,
        };
        let done = self.etcd.perform(self.now, Request::Txn(txn));
        assert!(matches!(
            done,
            Ok(Answer::Txn {
                succeeded: true,
                ..
            })
        ));
    }

    pub(super) fn run(mut self) -> Result<Summary, Failure> {
        while let Some((at, event)) = self.next() {
            if at.0 > TROUBLE_MS + RECOVERY_MS {
                break;
            }
            self.now = at.0;
            if self.etcd_up {
                self.etcd.end_leases(self.now);
                self.announce();
            }
            self.note(|| format!("{event:?}"));
            self.deliver(event);
            self.check_running();
            if let Some(failure) = self.failure {
                return Err(failure);
            }
        }
        self.check_end();
        match self.failure {
            Some(failure) => Err(failure),
            None => Ok(self.summary),
        }
    }

    fn next(&mut self) -> Option<((u64, u64), Event)> {
        self.queue.pop_first()
    }

    fn deliver(&mut self, event: Event) {
        match event {
            Event::Arrive { from, request } => self.arrive(from, request),
            Event::Answer { from, answer } => self.answer(from, answer),
            Event::WatchStart {
                host,
                process,
                generation,
                from,
            } => {
                self.watch_start(host, process, generation, from);
            }
            Event::WatchMore {
                host,
                process,
                generation,
            } => {
                self.watch_more(host, process, generation);
            }
            Event::WatchEnd {
                host,
                process,
                generation,
            } => {
                self.watch_report(host, process, generation, Watched::Broken);
            }
            Event::Tick { host, process } => self.tick(host, process),
            Event::Message { from, to, message } => self.message(from, to, message),
            Event::Client => self.client(),
            Event::Fault => self.fault(),
            Event::Start { host } => self.start(host),
            Event::EtcdUp => {
                self.etcd_up = true;
                self.etcd.restart(self.now);
            }
            Event::Heal { host } => self.hosts[host].etcd_cut = false,
            Event::HealPair { a, b } => {
                self.cut.remove(&(a, b));
                self.cut.remove(&(b, a));
            }
        }
    }

    // Time and chance.

    pub(super) fn later(&mut self, delay: u64, event: Event) {
        self.events += 1;
        self.queue.insert((self.now + delay, self.events), event);
    }

    pub(super) fn draw(&mut self, below: u64) -> u64 {
        next_random(&mut self.random) % below.max(1)
    }

    /// A delay, mostly in milliseconds, sometimes seconds.
    pub(super) fn delay(&mut self) -> u64 {
        match self.draw(60) {
            0 => self.draw(5000),
            1..=4 => self.draw(400),
            _ => 1 + self.draw(5),
        }
    }

    pub(super) fn in_trouble(&self) -> bool {
        self.now < TROUBLE_MS
    }

    pub(super) fn note(&self, line: impl Fn() -> String) {
        if self.trace {
            println!("{:>7} {}", self.now, line());
        }
    }

    pub(super) fn fail(&mut self, property: &'static str, detail: String) {
        if self.failure.is_none() {
            self.failure = Some(Failure { property, detail });
        }
    }

    /// Whether a process can be reached now. Deliveries to a stopped process wait.
    fn is_running(&self, host: usize, process: u64) -> bool {
        let running = self.hosts[host].process.as_ref();
        running.is_some_and(|running| running.number == process)
    }

    pub(super) fn postpone(&mut self, host: usize, event: Event) -> Option<Event> {
        let until = self.hosts[host].stopped_until;
        if until > self.now {
            let delay = until - self.now + self.draw(3);
            self.later(delay, event);
            return None;
        }
        Some(event)
    }

    // Processes.

    fn start(&mut self, at: usize) {
        if self.hosts[at].process.is_some() {
            return;
        }
        self.processes += 1;
        let number = self.processes;
        let host = &self.hosts[at];
        let relist_ms = if self.has_lists { 20_000 } else { u64::MAX / 2 };
        let timing = Timing {
            relist_ms,
            ..Timing::with_lease(LEASE_MS)
        };
        let verifier = self.signer.verifier();
        let engine = Engine::new(timing, host.node.clone(), number, verifier);
        self.hosts[at].process = Some(Process {
            number,
            engine,
            watch: None,
            calls: BTreeMap::new(),
            busy: BTreeSet::new(),
            wanted: BTreeSet::new(),
            unseen: BTreeSet::new(),
            confirmed: 0,
            ticks: 0,
        });
        self.recover(at);
        self.publish(at);
        self.later(
            1,
            Event::Tick {
                host: at,
                process: number,
            },
        );
    }

    /// Publishes a host's replica or its absence, and the tags of the home.
    pub(super) fn publish(&mut self, at: usize) {
        let host = &self.hosts[at];
        let replica = host.has_template.then(|| Replica {
            content: "c".to_owned(),
            bytes: 1,
            tagged: Some(tagged(host.build)),
        });
        let key = Key::Replica(template(), host.id().clone());
        let tags = Tags {
            epoch: 0,
            builds: BTreeMap::from([(TAG.to_owned(), host.build.to_string())]),
        };
        let home = Key::Tags(template(), host.id().clone());
        let replica = replica.as_ref().map(keys::encode);
        self.input(at, Input::Publish(key, replica));
        if at == HOME {
            self.input(at, Input::Publish(home, Some(keys::encode(&tags))));
        }
    }

    fn tick(&mut self, at: usize, process: u64) {
        if !self.is_running(at, process) {
            return;
        }
        let Some(event) = self.postpone(at, Event::Tick { host: at, process }) else {
            return;
        };
        self.later(Timing::TICK_MS, event);
        let load = Load {
            memory_free_mib: 4096,
            warm: BTreeMap::from([(template(), 1)]),
            running: u32::try_from(self.hosts[at].vms.len()).unwrap_or(0),
            cpus: 2,
            ..Load::default()
        };
        self.input(at, Input::Load(load));
        self.input(at, Input::Tick);
        self.serve(at);
    }

    /// Passes an input to a host's engine and performs the resulting actions.
    pub(super) fn input(&mut self, at: usize, input: Input) {
        let clock = self.now + self.hosts[at].clock_offset;
        let Some(process) = self.hosts[at].process.as_mut() else {
            return;
        };
        let number = process.number;
        for effect in process.engine.step(clock, input) {
            match effect {
                Effect::Ask(token, request) => {
                    self.send(at, number, Waits::Engine(token), request);
                }
                Effect::Watch { generation, from } => {
                    if let Some(process) = self.hosts[at].process.as_mut() {
                        process.watch = Some(WatchState {
                            generation,
                            next: None,
                            is_coming: false,
                        });
                    }
                    let delay = self.delay();
                    let start = Event::WatchStart {
                        host: at,
                        process: number,
                        generation,
                        from,
                    };
                    self.later(delay, start);
                }
                Effect::View(_) => {}
                Effect::Event(event) => self.cluster_event(at, event),
            }
        }
    }

    // Requests to etcd.

    pub(super) fn send(&mut self, at: usize, process: u64, waits: Waits, request: Request) {
        self.requests += 1;
        let from = Source {
            host: at,
            process,
            waits,
            number: self.requests,
        };
        let delay = self.delay();
        self.later(delay, Event::Arrive { from, request });
        let answer = Err(Fault::Unknown);
        self.later(DEADLINE_MS, Event::Answer { from, answer });
    }

    fn arrive(&mut self, from: Source, request: Request) {
        if !self.etcd_up || self.hosts[from.host].etcd_cut {
            return;
        }
        let answer = self.etcd.perform(self.now, request);
        if answer == Ok(Answer::Renewed { alive: false }) {
            self.summary.leases_lost += 1;
        }
        self.announce();
        let delay = self.delay();
        self.later(delay, Event::Answer { from, answer });
    }

    fn answer(&mut self, from: Source, answer: Result<Answer, Fault>) {
        let is_first = !self.answered.contains(&from.number);
        let is_cut = answer.is_ok() && self.hosts[from.host].etcd_cut;
        if !is_first || is_cut || !self.is_running(from.host, from.process) {
            return;
        }
        let Some(event) = self.postpone(from.host, Event::Answer { from, answer }) else {
            return;
        };
        let Event::Answer { answer, .. } = event else {
            return;
        };
        self.answered.insert(from.number);
        match from.waits {
            Waits::Engine(token) => self.input(from.host, Input::Answer(token, answer)),
            Waits::Server(call) => self.called(from.host, call, answer),
        }
    }

    // Watches.

    fn watch_start(&mut self, host: usize, process: u64, generation: u64, from: u64) {
        if !self.etcd_up || self.hosts[host].etcd_cut {
            self.later(
                DEADLINE_MS,
                Event::WatchEnd {
                    host,
                    process,
                    generation,
                },
            );
            return;
        }
        if self.etcd.since(from).is_none() {
            self.watch_report(host, process, generation, Watched::Compacted);
            return;
        }
        let revision = self.etcd.revision();
        self.watch_report(host, process, generation, Watched::Started { revision });
        if let Some(watch) = self.watch_of(host, process, generation) {
            watch.next = Some(from);
        }
        self.announce();
    }

    fn watch_of(&mut self, host: usize, process: u64, generation: u64) -> Option<&mut WatchState> {
        let running = self.hosts[host].process.as_mut()?;
        let watch = running.watch.as_mut()?;
        (running.number == process && watch.generation == generation).then_some(watch)
    }

    /// Lets every watch check for changes.
    fn announce(&mut self) {
        let revision = self.etcd.revision();
        for host in 0..self.hosts.len() {
            let Some(process) = self.hosts[host].process.as_mut() else {
                continue;
            };
            let number = process.number;
            let Some(watch) = process.watch.as_mut() else {
                continue;
            };
            if watch.is_coming || watch.next.is_none_or(|next| next > revision) {
                continue;
            }
            watch.is_coming = true;
            let (process, generation) = (number, watch.generation);
            let delay = self.delay();
            self.later(
                delay,
                Event::WatchMore {
                    host,
                    process,
                    generation,
                },
            );
        }
    }

    fn watch_more(&mut self, host: usize, process: u64, generation: u64) {
        let more = Event::WatchMore {
            host,
            process,
            generation,
        };
        if self.postpone(host, more).is_none() {
            return;
        }
        let is_cut = !self.etcd_up || self.hosts[host].etcd_cut;
        let Some(watch) = self.watch_of(host, process, generation) else {
            return;
        };
        watch.is_coming = false;
        let Some(next) = watch.next.filter(|_| !is_cut) else {
            return;
        };
        let Some(changes) = self.etcd.since(next) else {
            self.watch_report(host, process, generation, Watched::Compacted);
            return;
        };
        let Some(last) = changes.last().map(crate::store::Change::revision) else {
            return;
        };
        if let Some(watch) = self.watch_of(host, process, generation) {
            watch.next = Some(last + 1);
        }
        self.watch_report(host, process, generation, Watched::Changes(changes));
    }

    fn watch_report(&mut self, host: usize, process: u64, generation: u64, report: Watched) {
        if self.watch_of(host, process, generation).is_none() {
            return;
        }
        if self.hosts[host].stopped_until > self.now {
            let delay = self.hosts[host].stopped_until - self.now;
            self.later(
                delay,
                Event::WatchEnd {
                    host,
                    process,
                    generation,
                },
            );
            return;
        }
        if matches!(report, Watched::Broken | Watched::Compacted)
            && let Some(process) = self.hosts[host].process.as_mut()
        {
            process.watch = None;
        }
        self.input(host, Input::Watched(generation, report));
    }

    /// Ends every watch, at different times.
    pub(super) fn break_watches(&mut self) {
        for host in 0..self.hosts.len() {
            self.break_watch(host);
        }
    }

    pub(super) fn break_watch(&mut self, host: usize) {
        let Some(process) = &self.hosts[host].process else {
            return;
        };
        let number = process.number;
        let Some(WatchState { generation, .. }) = process.watch else {
            return;
        };
        if let Some(watch) = self.watch_of(host, number, generation) {
            watch.next = None;
        }
        let delay = self.draw(8000);
        let end = Event::WatchEnd {
            host,
            process: number,
            generation,
        };
        self.later(delay, end);
    }
}

fn host(at: usize) -> Host {
    let id: NodeId = format!("n{at}").parse().unwrap();
    Host {
        node: Node {
            identity: format!("identity of {id}"),
            address: format!("10.0.0.{at}:3000"),
            incarnation: "0".parse().unwrap(),
            platform: Platform::Ring3,
            cpu: CpuKind::default(),
            version: "1".to_owned(),
            id,
        },
        slot: HomeSlot::new(u16::try_from(at).unwrap()).unwrap(),
        process: None,
        disk: BTreeMap::new(),
        vms: BTreeSet::new(),
        has_template: true,
        build: 0,
        stopped_until: 0,
        clock_offset: 1_000_000 * at as u64,
        etcd_cut: false,
        boots: 0,
    }
}

pub(super) fn template() -> TemplateId {
    TEMPLATE.parse().unwrap()
}

/// A build of the template.
pub(super) fn tagged(build: u64) -> Tagged {
    Tagged {
        template: template(),
        tag: TAG.to_owned(),
        build: build.to_string(),
    }
}

pub(super) fn put(key: Key, value: Vec<u8>) -> Write {
    Write::Put {
        key,
        value,
        lease: None,
    }
}

impl Host {
    pub(super) fn id(&self) -> &NodeId {
        &self.node.id
    }
}

impl World {
    pub(super) fn at(&self, node: &NodeId) -> Option<usize> {
        self.hosts.iter().position(|host| host.id() == node)
    }

    pub(super) fn set_state(&mut self, node: &NodeId, state: NodeState) {
        let then = vec![put(Key::State(node.clone()), keys::encode(&state))];
        let txn = Txn {
            when: Vec::new(),
            then,
        };
        let _ = self.etcd.perform(self.now, Request::Txn(txn));
        self.announce();
    }

    /// The view of a host's process.
    pub(super) fn view(&self, at: usize) -> Option<Arc<crate::View>> {
        let process = self.hosts[at].process.as_ref()?;
        Some(Arc::new(process.engine.view().clone()))
    }
}
