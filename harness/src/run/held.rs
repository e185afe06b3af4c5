//! Operations on held clones: read their ledgers, repeat commands in them, and kill them.

use std::{sync::mpsc::Sender, thread};

use crate::{
    clock,
    event::{CloneLedger, RunEvent},
    exchange::{FirstCommand, Network},
    memory,
    scenario::{ExchangeSpec, ExecSpec, TurnSpec},
    target::{CloneId, Sandbox},
};

/// Number of threads that run commands in held clones or kill them.
const THREADS: usize = 4;
/// Number of threads that repeat denied exchanges. It is large, because they mostly wait for timeouts.
const WAITING_THREADS: usize = 64;

/// A clone that is alive after its first command and its turns.
pub(super) struct HeldClone {
    pub(super) id: CloneId,
    pub(super) sandbox: Box<dyn Sandbox>,
}

/// Reads the memory of each clone whose VMM is a process of this host. `guest` is the memory file of the template;
/// `None` searches the mappings of each VMM.
pub(super) fn ledgers(clones: &[HeldClone], guest: Option<memory::FileId>) -> Vec<CloneLedger> {
    clones
        .iter()
        .filter_map(|clone| {
            let pid = clone.sandbox.pid()?;
            let guest = guest.or_else(|| memory::template_memory(pid));
            let mut ledger = memory::clone_ledger(pid, guest);
            ledger.round = clone.id.round;
            ledger.arrival = clone.id.arrival;
            Some(ledger)
        })
        .collect()
}

/// Repeats the command in each clone, in [`THREADS`] clones at a time.
pub(super) fn exec_again(
    clones: &mut [HeldClone],
    command: &ExecSpec,
    network: Option<&Network>,
    events: &Sender<RunEvent>,
) {
    thread::scope(|scope| {
        for part in clones.chunks_mut(part_size(clones.len())) {
            let events = events.clone();
            scope.spawn(move || {
                for clone in part {
                    let began = clock::monotonic_ns();
                    let answer = FirstCommand::prepare(command, network)
                        .and_then(|first| first.run(clone.sandbox.as_mut()));
                    let took = clock::monotonic_ns() - began;
                    // Sending fails only if the recorder has failed.
                    let _ = events.send(RunEvent::AfterHold {
                        round: clone.id.round,
                        arrival: clone.id.arrival,
                        took_ns: answer.is_ok().then_some(took),
                        failure: answer.err(),
                    });
                }
            });
        }
    });
}

/// Repeats the first denied exchange of `turns` in all clones, in up to [`WAITING_THREADS`] clones at a time. Only
/// failures are recorded: a clone reached the destination, or the attempt could not be made.
pub(super) fn deny_again(
    clones: &mut [HeldClone],
    turns: &[TurnSpec],
    network: &Network,
    events: &Sender<RunEvent>,
) {
    let denied = |turn: &&TurnSpec| turn.exchange == Some(ExchangeSpec::Denied);
    let Some(turn) = turns.iter().find(denied) else {
        return;
    };
    thread::scope(|scope| {
        for part in clones.chunks_mut(clones.len().div_ceil(WAITING_THREADS).max(1)) {
            let events = events.clone();
            scope.spawn(move || {
                for clone in part {
                    let sandbox = clone.sandbox.as_mut();
                    let tried = network.exchange(sandbox, ExchangeSpec::Denied, &turn.exec);
                    if let Err(failure) = tried {
                        // Sending fails only if the recorder has failed.
                        let _ = events.send(RunEvent::AfterHold {
                            round: clone.id.round,
                            arrival: clone.id.arrival,
                            took_ns: None,
                            failure: Some(failure),
                        });
                    }
                }
            });
        }
    });
}

/// Kills all clones. A clone that cannot be killed is reported on standard error and left to the next sweep.
pub(super) fn kill_all(mut clones: Vec<HeldClone>) {
    let size = part_size(clones.len());
    thread::scope(|scope| {
        while !clones.is_empty() {
            let part = clones.split_off(clones.len().saturating_sub(size));
            scope.spawn(move || {
                for clone in part {
                    if let Err(failure) = clone.sandbox.kill() {
                        eprintln!(
                            "cube-bench: cannot kill a clone: {}; run `cube-bench sweep`",
                            failure.message
                        );
                    }
                }
            });
        }
    });
}

fn part_size(n: usize) -> usize {
    n.div_ceil(THREADS).max(1)
}
