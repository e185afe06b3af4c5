use std::{collections::BTreeMap, sync::Arc};

use proptest::prelude::*;

use super::*;
use crate::{CpuKind, Replica, Tagged, Tags};

fn id(number: usize) -> NodeId {
    format!("n{number}").parse().unwrap()
}

fn template() -> TemplateId {
    "base".parse().unwrap()
}

fn node(number: usize, platform: Platform, features: &[&str]) -> Node {
    Node {
        id: id(number),
        identity: String::new(),
        address: format!("10.0.0.{number}:3000"),
        incarnation: "0".parse().unwrap(),
        platform,
        cpu: CpuKind {
            features: features.iter().map(|&text| text.to_owned()).collect(),
            ..CpuKind::default()
        },
        version: "1".to_owned(),
    }
}

fn needs() -> Needs {
    Needs {
        template: template(),
        content: None,
        memory_mib: 256,
        platform: None,
        features: BTreeSet::new(),
        except: BTreeSet::new(),
    }
}

fn load(memory_free_mib: u64, warm: u32, creating: u32) -> Load {
    Load {
        memory_free_mib,
        warm: BTreeMap::from([(template(), warm)]),
        creating,
        cpus: 2,
        ..Load::default()
    }
}

/// Ready nodes 0, 1, … with the template; node 0 is this one.
fn view(loads: &[Load]) -> View {
    let mut view = View {
        this: Some(id(0)),
        ..View::default()
    };
    let replica = Replica {
        content: "c".to_owned(),
        bytes: 1,
        tagged: None,
    };
    for (number, load) in loads.iter().enumerate() {
        let node = node(number, Platform::Ring3, &["sse2"]);
        Arc::make_mut(&mut view.nodes).insert(id(number), node);
        Arc::make_mut(&mut view.loads).insert(id(number), load.clone());
        let replicas = Arc::make_mut(&mut view.replicas);
        let of_template = replicas.entry(template()).or_default();
        of_template.insert(id(number), replica.clone());
    }
    view
}

fn order(view: &View, needs: &Needs) -> Vec<String> {
    let order = place(view, needs, |_| 0, 1);
    order.into_iter().map(|c| c.node.into()).collect()
}

#[test]
fn a_node_that_cannot_run_the_sandbox_is_no_candidate() {
    let mut view = view(&vec![load(4096, 1, 0); 5]);
    Arc::make_mut(&mut view.states).insert(id(0), NodeState::Cordoned);
    Arc::make_mut(&mut view.states).insert(id(1), NodeState::Draining);
    let replicas = Arc::make_mut(&mut view.replicas);
    replicas.get_mut(&template()).unwrap().remove(&id(2));
    assert_eq!(order(&view, &needs()).len(), 2);
    let except = BTreeSet::from([id(3)]);
    assert_eq!(order(&view, &Needs { except, ..needs() }), ["n4"]);
    let wrong = [
        Needs {
            content: Some("d".to_owned()),
            ..needs()
        },
        Needs {
            platform: Some(Platform::Hvm),
            ..needs()
        },
        Needs {
            features: BTreeSet::from(["avx512f".to_owned()]),
            ..needs()
        },
        Needs {
            template: "other".parse().unwrap(),
            ..needs()
        },
    ];
    for needs in wrong {
        assert!(order(&view, &needs).is_empty(), "{needs:?}");
    }
    let right = Needs {
        content: Some("c".to_owned()),
        platform: Some(Platform::Ring3),
        features: BTreeSet::from(["sse2".to_owned()]),
        ..needs()
    };
    assert_eq!(order(&view, &right).len(), 2);
}

#[test]
fn a_build_that_the_home_has_replaced_is_no_candidate() {
    let mut view = view(&vec![load(4096, 1, 0); 3]);
    let tagged = |build: &str| Tagged {
        template: "t".parse().unwrap(),
        tag: "v1".to_owned(),
        build: build.to_owned(),
    };
    let tags = |epoch, build: Option<&str>| Tags {
        epoch,
        builds: build
            .map(|build| ("v1".to_owned(), build.to_owned()))
            .into_iter()
            .collect(),
    };
    // The home, n0, publishes its replica after its tags.
    for (number, build) in ["old", "old", "new"].iter().enumerate() {
        let of_template = Arc::make_mut(&mut view.replicas).get_mut(&template());
        let replica = of_template.unwrap().get_mut(&id(number)).unwrap();
        replica.tagged = Some(tagged(build));
    }
    let mut tried = |written: &[(usize, Tags)]| {
        let written = written.iter().map(|(at, tags)| (id(*at), tags.clone()));
        let of_template = ("t".parse().unwrap(), written.collect());
        view.tags = Arc::new(BTreeMap::from([of_template]));
        let mut order = order(&view, &needs());
        order.sort();
        order
    };
    assert_eq!(tried(&[]), ["n0", "n1", "n2"], "the home is away");
    let new = (0, tags(0, Some("new")));
    assert_eq!(tried(std::slice::from_ref(&new)), ["n0", "n2"]);
    // Of two homes, the later one wins, then the first one.
    assert_eq!(tried(&[new.clone(), (1, tags(0, None))]), ["n0", "n2"]);
    assert_eq!(
        tried(&[new.clone(), (1, tags(1, Some("old")))]),
        ["n0", "n1"]
    );
    // The tag was removed, or a node deleted the template.
    assert_eq!(tried(&[(0, tags(0, None))]), ["n0"]);
    assert_eq!(tried(&[new, (2, Tags::deleted())]), ["n2"]);
}

#[test]
fn memory_counts_before_warm_slots_and_warm_slots_before_load() {
    for (loads, expected) in [
        ([load(255, 9, 0), load(256, 0, 9)], ["n1", "n0"]),
        ([load(9000, 0, 0), load(9000, 1, 9)], ["n1", "n0"]),
        ([load(9000, 1, 3), load(300, 1, 1)], ["n1", "n0"]),
        ([load(512, 1, 1), load(4096, 1, 1)], ["n1", "n0"]),
        // Less than twice the room elsewhere: the create is not forwarded.
        ([load(4096, 1, 1), load(5000, 1, 1)], ["n0", "n1"]),
    ] {
        assert_eq!(order(&view(&loads), &needs()), expected, "{loads:?}");
    }
}

#[test]
fn creates_that_were_sent_take_their_warm_slots_before_the_next_load_arrives() {
    let view = view(&[load(4096, 2, 0), load(4096, 2, 0)]);
    let sent = |n: u32| move |node: &NodeId| if *node == id(0) { n } else { 0 };
    let first = |n| place(&view, &needs(), sent(n), 1)[0].node.clone();
    assert_eq!((first(0), first(2)), (id(0), id(1)));
}

proptest! {
    /// All nodes that can run the sandbox are tried, each once, and the first is the best of those compared.
    #[test]
    fn every_eligible_node_is_tried_once(
        loads in prop::collection::vec((0..8192_u64, 0..3_u32, 0..9_u32), 1..9), random: u64
    ) {
        let loads: Vec<Load> = loads.into_iter().map(|(m, w, c)| load(m, w, c)).collect();
        let view = view(&loads);
        let tried = place(&view, &needs(), |_| 0, random);
        let set: BTreeSet<NodeId> = tried.iter().map(|c| c.node.clone()).collect();
        prop_assert_eq!((tried.len(), set.len()), (loads.len(), loads.len()));
        let score = |at: usize| score(&view, &view.nodes[&tried[at].node], &needs(), 0);
        let compared = tried.len().min(COMPARED);
        prop_assert!((1..compared).all(|at| score(at - 1) >= score(at)));
        prop_assert!(tried[..compared].iter().any(|c| c.node == id(0) && c.address.is_none()));
    }
}
