//! Bugs that the simulation found, and each path through the engine, on the simulation's etcd without delays.

use model::{Platform, SandboxId};

use super::*;
use crate::{
    CpuKind, HomeSlot, MemberSigner, NodeId, OwnerState, Replica, Tags, keys,
    roll::tests::{applicant, signer},
    simulation::etcd::Etcd,
    store::{Txn, When, Write},
};

/// One node and etcd. Requests are served at once unless etcd is down.
struct Bench {
    now: u64,
    etcd: Etcd,
    is_away: bool,
    /// Requests take effect, but their responses are lost.
    is_deaf: bool,
    engine: Engine,
    signer: MemberSigner,
    /// Generation and next revision of the watch.
    watch: Option<(u64, u64)>,
    events: Vec<ClusterEvent>,
}

fn id(name: &str) -> NodeId {
    name.parse().unwrap()
}

fn node(name: &str) -> Node {
    Node {
        id: id(name),
        identity: "x".to_owned(),
        address: String::new(),
        incarnation: "0".parse().unwrap(),
        platform: Platform::Ring3,
        cpu: CpuKind::default(),
        version: String::new(),
    }
}

fn put(key: Key, value: Vec<u8>) -> Request {
    let lease = None;
    Request::Txn(Txn {
        when: Vec::<When>::new(),
        then: vec![Write::Put { key, value, lease }],
    })
}

fn replica() -> Key {
    Key::Replica("base".parse().unwrap(), id("a"))
}

fn value() -> Vec<u8> {
    keys::encode(&Replica {
        content: "c".to_owned(),
        bytes: 1,
        tagged: None,
    })
}

impl Bench {
    /// A registered node with a replica.
    fn new() -> Self {
        let mut etcd = Etcd::new();
        let signer = signer();
        let member = signer.member(&applicant("a", "x"), HomeSlot::new(0).unwrap());
        let member = put(Key::Member(id("a")), keys::encode(&member));
        etcd.perform(0, member).unwrap();
        let mut bench = Self {
            now: 1000,
            etcd,
            is_away: false,
            is_deaf: false,
            engine: Engine::new(Timing::with_lease(10_000), node("a"), 1, signer.verifier()),
            signer,
            watch: None,
            events: Vec::new(),
        };
        bench.input(Input::Publish(replica(), Some(value())));
        bench.pass(5000);
        assert_eq!(bench.engine.standing(), Standing::Registered);
        assert!(bench.has("replicas/a/base"));
        bench
    }

    fn has(&self, key: &str) -> bool {
        let key = format!("{}{key}", keys::PREFIX);
        self.etcd.entries().iter().any(|entry| entry.key == key)
    }

    fn pass(&mut self, ms: u64) {
        for _ in 0..ms / Timing::TICK_MS {
            self.now += Timing::TICK_MS;
            self.etcd.end_leases(self.now);
            self.input(Input::Tick);
            self.follow();
        }
    }

    fn follow(&mut self) {
        let Some((generation, next)) = self.watch.filter(|_| !self.is_away) else {
            return;
        };
        let Some(changes) = self.etcd.since(next) else {
            self.watch = None;
            self.input(Input::Watched(generation, Watched::Compacted));
            return;
        };
        if let Some(last) = changes.last() {
            self.watch = Some((generation, last.revision() + 1));
            self.input(Input::Watched(generation, Watched::Changes(changes)));
        }
    }

    fn break_watch(&mut self) {
        if let Some((generation, _)) = self.watch.take() {
            self.input(Input::Watched(generation, Watched::Broken));
        }
    }

    fn input(&mut self, input: Input) {
        let mut inputs = vec![input];
        while let Some(input) = inputs.pop() {
            for effect in self.engine.step(self.now, input) {
                match effect {
                    Effect::Ask(token, request) => {
                        let mut answer = Err(Fault::Unknown);
                        if !self.is_away {
                            answer = self.etcd.perform(self.now, request);
                        }
                        if self.is_deaf {
                            answer = Err(Fault::Unknown);
                        }
                        inputs.push(Input::Answer(token, answer));
                    }
                    Effect::Watch { generation, from } => {
                        self.watch = Some((generation, from));
                        let revision = self.etcd.revision();
                        let started = Watched::Started { revision };
                        inputs.push(Input::Watched(generation, started));
                    }
                    Effect::View(_) => {}
                    Effect::Event(event) => self.events.push(event),
                }
            }
        }
    }
}

/// Seed 521: the record of the node was in the backup, the replica was not, and etcd had caught up before the next list.
#[test]
fn a_replica_that_etcd_has_lost_is_written_again() {
    let mut bench = Bench::new();
    let key = replica();
    let lost = Txn {
        when: Vec::new(),
        then: vec![Write::Delete(key)],
    };
    // Without a change that the watch would deliver.
    let (generation, _) = bench.watch.unwrap();
    bench.etcd.perform(bench.now, Request::Txn(lost)).unwrap();
    bench.watch = Some((generation, bench.etcd.revision() + 1));
    assert!(!bench.has("replicas/a/base"));
    bench.pass(70_000);
    assert!(bench.has("replicas/a/base"));
}

/// Seed 7727: a deletion without a response was repeated, then the replica was added, and the first deletion arrived.
#[test]
fn a_replica_is_written_again_after_a_deletion_that_arrived_late() {
    let mut bench = Bench::new();
    let key = replica();
    let late = Txn {
        when: Vec::new(),
        then: vec![Write::Delete(key)],
    };
    bench.etcd.perform(bench.now, Request::Txn(late)).unwrap();
    assert!(!bench.has("replicas/a/base"));
    bench.pass(5000);
    assert!(bench.has("replicas/a/base"));
}

/// Seed 145: a deletion without a response took effect, and the same replica was added again.
#[test]
fn a_replica_is_written_again_after_a_deletion_without_an_answer() {
    let mut bench = Bench::new();
    bench.is_deaf = true;
    bench.input(Input::Publish(replica(), None));
    assert!(!bench.has("replicas/a/base"));
    bench.input(Input::Publish(replica(), Some(value())));
    bench.is_deaf = false;
    bench.pass(5000);
    assert!(bench.has("replicas/a/base"));
}

#[test]
fn a_request_that_arrives_late_does_not_bring_a_former_build_back() {
    let mut bench = Bench::new();
    let key = Key::Tags("t".parse().unwrap(), id("a"));
    let tags = |build: &str| Tags {
        epoch: 0,
        builds: BTreeMap::from([("v1".to_owned(), build.to_owned())]),
    };
    let publish = |build| Input::Publish(key.clone(), Some(keys::encode(&tags(build))));
    let mut effects = bench.engine.step(bench.now, publish("former"));
    let Some(Effect::Ask(token, late)) = effects.pop() else {
        panic!("nothing is written: {effects:?}");
    };
    bench.input(Input::Answer(token, Err(Fault::Unknown)));
    bench.pass(2000);
    bench.input(publish("new"));
    bench.pass(2000);
    let written = |bench: &Bench| {
        let view = bench.engine.view();
        view.tags[&"t".parse().unwrap()][&id("a")].clone()
    };
    assert_eq!(written(&bench), tags("new"));
    bench.etcd.perform(bench.now, late).unwrap();
    bench.follow();
    assert_eq!(written(&bench), tags("new"));
    assert_eq!(bench.engine.standing(), Standing::Registered);
}

#[test]
fn a_lease_that_has_ended_is_replaced_with_all_that_was_under_it() {
    let mut bench = Bench::new();
    let tags = Tags {
        epoch: 0,
        builds: BTreeMap::new(),
    };
    let key = Key::Tags("t".parse().unwrap(), id("a"));
    bench.input(Input::Publish(key.clone(), Some(keys::encode(&tags))));
    assert!(bench.has("tags/a/t"));
    let before = bench.engine.lease();
    bench.is_away = true;
    bench.break_watch();
    bench.pass(30_000);
    assert!(!bench.has("nodes/a") && bench.events.contains(&ClusterEvent::Detached));
    bench.is_away = false;
    bench.pass(5000);
    assert_ne!(bench.engine.lease(), before);
    assert!(bench.has("nodes/a") && bench.has("replicas/a/base") && bench.has("load/a"));
    assert_eq!(
        bench.engine.view().tags[&"t".parse().unwrap()][&id("a")],
        tags
    );
    assert!(bench.events.contains(&ClusterEvent::Attached));
    bench.input(Input::Publish(key, None));
    assert!(!bench.has("tags/a/t"));
}

#[test]
fn a_successor_on_the_same_host_takes_the_name_over_and_the_predecessor_yields() {
    let mut bench = Bench::new();
    let verifier = bench.signer.verifier();
    let mut successor = Engine::new(Timing::with_lease(10_000), node("a"), 2, verifier);
    std::mem::swap(&mut bench.engine, &mut successor);
    let watch = bench.watch.take();
    bench.pass(5000);
    assert_eq!(bench.engine.standing(), Standing::Registered);
    bench.watch = watch;
    std::mem::swap(&mut bench.engine, &mut successor);
    bench.pass(5000);
    assert_eq!(bench.engine.standing(), Standing::Replaced);
}

#[test]
fn a_host_with_the_name_of_another_waits() {
    let mut bench = Bench::new();
    let mut twin = node("a");
    twin.incarnation = "1".parse().unwrap();
    let verifier = bench.signer.verifier();
    bench.engine = Engine::new(Timing::with_lease(10_000), twin, 2, verifier);
    bench.watch = None;
    bench.pass(2000);
    assert_eq!(bench.engine.standing(), Standing::NameTaken);
    // The first one's lease ends. It belonged to this host before its reboot.
    bench.pass(20_000);
    assert_eq!(bench.engine.standing(), Standing::Registered);
}

fn owner(node: &str, epoch: u64, state: OwnerState) -> Owner {
    Owner {
        node: id(node),
        epoch,
        state,
        offered_to: None,
    }
}

/// Seed 158: a paused sandbox was taken over and ended, and its record was deleted, while its first node was
/// unreachable.
#[test]
fn a_lost_record_of_a_running_sandbox_is_written_again_and_of_a_paused_one_reported() {
    let mut bench = Bench::new();
    let (running, paused) = (
        SandboxId::from_random([1; 19]),
        SandboxId::from_random([2; 19]),
    );
    let held = owner("a", 4, OwnerState::Running);
    bench.input(Input::Hold(running.clone(), held, 0));
    let held = owner("a", 4, OwnerState::Paused);
    bench.input(Input::Hold(paused.clone(), held, 0));
    bench.pass(1000);
    assert!(bench.has(&format!("owner/{running}")));
    assert!(!bench.has(&format!("owner/{paused}")));
    assert!(
        bench
            .events
            .contains(&ClusterEvent::Forgotten { sandbox: paused })
    );
    let written = &bench.engine.view().owners[&running].owner;
    assert_eq!((written.epoch, written.state), (5, OwnerState::Running));
}

#[test]
fn a_sandbox_that_another_node_has_with_a_later_epoch_is_superseded() {
    let mut bench = Bench::new();
    let sandbox = SandboxId::from_random([1; 19]);
    let held = owner("a", 4, OwnerState::Paused);
    bench.input(Input::Hold(sandbox.clone(), held, 0));
    bench.input(Input::Changing(sandbox.clone()));
    let later = owner("b", 5, OwnerState::Paused);
    let record = put(Key::Owner(sandbox.clone()), keys::encode(&later));
    bench.etcd.perform(bench.now, record).unwrap();
    let superseded = |bench: &Bench| {
        let mut events = bench.events.iter();
        events.any(|event| matches!(event, ClusterEvent::Superseded { .. }))
    };
    bench.pass(1000);
    // Nothing is reported while a change by this node is in flight.
    assert!(!superseded(&bench));
    bench.input(Input::Settled(sandbox));
    assert!(superseded(&bench));
}
