//! A deterministic simulation of several nodes on one etcd: the real engine, placement, owner changes and recovery of
//! moves, on virtual time and one thread. All randomness comes from the seed.
//!
//! ```text
//! seed ─► World ─┬─ Etcd: linearizable, with leases, compaction, restarts, backups
//!                ├─ Host × 3: clock, disk, VMs ─ Process (may crash, stop, be replaced): Engine + a model of the server
//!                └─ queue of messages: delayed, lost, reordered, cut off by partitions
//! ```
//! The model of the server treats sandboxes as `cube-api` does: create, pause, resume, kill, move, take over. It calls
//! the same functions of this crate. Properties are checked after every event, or at the end, after all faults have
//! been repaired and the nodes have had time to recover. A failed property is printed as `property: NAME`.
//!
//! A seed reproduces a run only as long as the simulation stays the same. Bugs that it has found are therefore tested
//! directly, in `engine::tests`.
//!
//! `CUBE_SIMULATION_SEEDS=20000 cargo test --release -p cluster --lib simulation::many` runs more seeds;
//! `CUBE_SIMULATION_SEED=7` one of them, with a trace.

pub(crate) mod etcd;
mod faults;
mod judge;
mod server;
mod world;

use world::{Failure, World};

/// Number of seeds in a normal test run.
const USUAL: u64 = 100;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

fn run(seed: u64, trace: bool) -> Result<world::Summary, Failure> {
    World::new(seed, trace).run()
}

fn report(seed: u64, failure: &Failure) -> String {
    format!(
        "property: {}\nseed {seed}: {}",
        failure.property, failure.detail
    )
}

#[test]
fn many_seeds_keep_every_property() {
    if let Some(seed) = number("CUBE_SIMULATION_SEED") {
        let summary = run(seed, true).unwrap_or_else(|f| panic!("{}", report(seed, &f)));
        println!("seed {seed}: {summary:?}");
        return;
    }
    let seeds = number("CUBE_SIMULATION_SEEDS").unwrap_or(USUAL);
    let mut total = world::Summary::default();
    for seed in 0..seeds {
        match run(seed, false) {
            Ok(summary) => total.add(&summary),
            Err(failure) => panic!("{}", report(seed, &failure)),
        }
    }
    println!("{seeds} seeds: {total:?}");
    // A simulation in which nothing happens proves nothing.
    let each = [
        total.created,
        total.moved,
        total.seen,
        total.outdated,
        total.taken_over,
        total.resumed,
        total.crashes,
        total.restores,
        total.compactions,
        total.leases_lost,
    ];
    assert!(each.iter().all(|count| *count > 0), "{total:?}");
}

#[test]
fn a_seed_gives_the_same_run_twice() {
    let summary = |seed| run(seed, false).map(|summary| format!("{summary:?}")).ok();
    assert_eq!(summary(5), summary(5));
}
