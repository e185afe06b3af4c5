//! The exchange `churn`: replaces the network policy while the sandbox sends datagrams. Measures the time of each
//! update and the time until an update that allows traffic takes effect, and detects datagrams that still arrive after
//! an update that denies them.
//!
//! The sandbox sends four datagrams per millisecond. The kernel of the host timestamps each arrival outside. Updates
//! alternate between a policy that allows nothing, which comes first, and the policy of the scenario.

use std::{
    io::{self, IoSliceMut},
    net::{SocketAddr, UdpSocket},
    os::fd::AsRawFd,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::Duration,
};

use netprobe::Action;
use nix::{
    errno::Errno,
    sys::{
        socket::{
            ControlMessageOwned, MsgFlags, SockaddrIn, recvmsg, setsockopt,
            sockopt::ReceiveTimestampns,
        },
        time::TimeSpec,
    },
    time::{ClockId, clock_gettime},
};

use super::{ALLOWED, Network, PROBE, command, lost, order, text_of};
use crate::{
    clock,
    event::{Exchanged, Failure, FailureCause},
    scenario::{ExecSpec, NetworkSpec},
    target::{Sandbox, exec_and_compare},
};

/// Interval between two datagrams of the sandbox, in microseconds.
const EVERY_US: u64 = 250;
/// Timeout of each wait for a datagram, and the margin by which the sandbox sends longer than planned.
const PATIENCE: Duration = Duration::from_secs(20);
/// Read timeout of the socket, after which the receiving thread checks whether to stop.
const LOOK: Duration = Duration::from_millis(10);
/// Largest accepted time between the two readings of CLOCK_MONOTONIC that enclose a reading of CLOCK_REALTIME, unless
/// [`TRIES`] attempts all exceed it.
const BRACKET_NS: u64 = 20_000;
/// Attempts to stay within [`BRACKET_NS`].
const TRIES: u32 = 20;
/// Shell script that starts the program `$0` with the argument `$1` in the background, so that it outlives the command.
const DETACHED: &str = "setsid \"$0\" \"$1\" >/dev/null 2>&1 </dev/null &";

/// One update of the policy. `opens` is true if the new policy is the scenario's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Swap {
    opens: bool,
    asked_ns: u64,
    answered_ns: u64,
}

pub(super) fn carry_out(
    network: &Network,
    sandbox: &mut dyn Sandbox,
    count: u32,
    every: Duration,
    like: &ExecSpec,
) -> Result<Exchanged, Failure> {
    let socket = network
        .outside
        .within(listen)
        .map_err(|e| lost(format!("cannot listen outside: {e}")))?;
    let to = socket
        .local_addr()
        .map_err(|e| lost(format!("cannot listen outside: {e}")))?;
    // Longer than the planned updates, because updates can be late.
    let lasts = every * count * 2 + PATIENCE;
    start(sandbox, to, lasts, like)?;
    let receiver = Receiver::default();
    let (swapped, arrivals) = thread::scope(|scope| {
        let received = scope.spawn(|| receiver.receive(&socket));
        let swapped = receiver
            .await_arrival(1)
            .and_then(|()| swap_all(network, sandbox, &receiver, count, every));
        receiver.stop.store(true, Ordering::Relaxed);
        let arrivals = received
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        (swapped, arrivals)
    });
    let (swaps, end_ns) = swapped?;
    let arrivals = arrivals.map_err(|e| lost(format!("the peer outside: {e}")))?;
    evaluate(&swaps, &arrivals, end_ns)
}

fn listen() -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind(SocketAddr::from((ALLOWED, 0)))?;
    setsockopt(&socket, ReceiveTimestampns, &true)?;
    socket.set_read_timeout(Some(LOOK))?;
    Ok(socket)
}

fn start(
    sandbox: &mut dyn Sandbox,
    to: SocketAddr,
    lasts: Duration,
    like: &ExecSpec,
) -> Result<(), Failure> {
    let every_us = EVERY_US;
    let order = text_of(&order(Action::Pulse { to, every_us }, lasts))?;
    exec_and_compare(
        sandbox,
        &command(&["/bin/sh", "-c", DETACHED, PROBE, &order], like),
    )
}

/// Makes all updates, and returns them with the instant at which the period of the last update ended. After each update
/// that allows traffic, waits for a datagram, so that a slow sandbox is not mistaken for a blocked one.
fn swap_all(
    network: &Network,
    sandbox: &mut dyn Sandbox,
    receiver: &Receiver,
    count: u32,
    every: Duration,
) -> Result<(Vec<Swap>, u64), Failure> {
    let options = [NetworkSpec::closed_options(), network.spec.options()];
    let mut swaps = Vec::new();
    let mut next_ns = clock::monotonic_ns();
    for (number, options) in (0..count).zip(options.iter().cycle()) {
        clock::sleep_until(next_ns);
        let asked_ns = clock::monotonic_ns();
        sandbox.set_network(options)?;
        let swap = Swap {
            opens: number % 2 == 1,
            asked_ns,
            answered_ns: clock::monotonic_ns(),
        };
        swaps.push(swap);
        if swap.opens {
            receiver.await_arrival(asked_ns)?;
        }
        // Even after a late response, wait at least half a period for datagrams that should have been denied.
        let every_ns = clock::nanoseconds(every);
        next_ns = (asked_ns + every_ns).max(swap.answered_ns + every_ns / 2);
    }
    clock::sleep_until(next_ns);
    Ok((swaps, next_ns))
}

/// Receives the datagrams of the sandbox.
#[derive(Debug, Default)]
struct Receiver {
    /// Arrival of the last datagram; 0 before the first.
    last_ns: AtomicU64,
    /// Set to end [`Self::receive`].
    stop: AtomicBool,
}

impl Receiver {
    /// Receives until `stop` is set, and returns the arrival of each datagram.
    fn receive(&self, socket: &UdpSocket) -> io::Result<Vec<u64>> {
        let mut arrivals = Vec::new();
        let mut buffer = [0; 2048];
        let mut control = nix::cmsg_space!(TimeSpec);
        while !self.stop.load(Ordering::Relaxed) {
            let mut parts = [IoSliceMut::new(&mut buffer)];
            let got = recvmsg::<SockaddrIn>(
                socket.as_raw_fd(),
                &mut parts,
                Some(&mut control),
                MsgFlags::empty(),
            );
            let got = match got {
                Ok(got) => got,
                Err(Errno::EAGAIN | Errno::EINTR) => continue,
                Err(error) => return Err(error.into()),
            };
            let stamp = got.cmsgs()?.find_map(|one| match one {
                ControlMessageOwned::ScmTimestampns(stamp) => Some(stamp),
                _ => None,
            });
            let stamp =
                stamp.ok_or_else(|| io::Error::other("a datagram has no kernel time stamp"))?;
            let arrived = monotonic(stamp)?;
            self.last_ns.store(arrived, Ordering::Relaxed);
            arrivals.push(arrived);
        }
        Ok(arrivals)
    }

    /// Waits until a datagram has arrived at `from_ns` or later.
    fn await_arrival(&self, from_ns: u64) -> Result<(), Failure> {
        let until = clock::monotonic_ns() + clock::nanoseconds(PATIENCE);
        while self.last_ns.load(Ordering::Relaxed) < from_ns {
            if clock::monotonic_ns() > until {
                return Err(lost(format!("no datagram arrived within {PATIENCE:?}")));
            }
            thread::sleep(LOOK / 10);
        }
        Ok(())
    }
}

/// Converts a recent stamp of CLOCK_REALTIME to CLOCK_MONOTONIC. Both clocks are read for each stamp and in quick
/// succession, so that earlier adjustments of the wall clock do not distort the result.
fn monotonic(stamp: TimeSpec) -> io::Result<u64> {
    for attempt in 1..=TRIES {
        let before = clock::monotonic_ns();
        let wall = clock::nanoseconds(clock_gettime(ClockId::CLOCK_REALTIME)?.into());
        let after = clock::monotonic_ns();
        if after - before <= BRACKET_NS || attempt == TRIES {
            // Using `before` gives the smaller result, so an arrival is never dated too late.
            return Ok((before + clock::nanoseconds(stamp.into())).saturating_sub(wall));
        }
    }
    Err(io::ErrorKind::Other.into())
}

/// Evaluates the arrivals. `arrivals` must be in ascending order; `end_ns` is the end of the period of the last update.
///
/// # Errors
/// Returns a network failure if, after an update that allows traffic, no datagram arrived before the next
/// update, and otherwise a breach if a datagram arrived between the response to an update that denies traffic and
/// the next update.
fn evaluate(swaps: &[Swap], arrivals: &[u64], end_ns: u64) -> Result<Exchanged, Failure> {
    let mut exchanged = Exchanged::default();
    let mut passed = 0;
    for (number, swap) in swaps.iter().enumerate() {
        exchanged.times_ns.push(swap.answered_ns - swap.asked_ns);
        let until_ns = swaps.get(number + 1).map_or(end_ns, |next| next.asked_ns);
        let between = |from: u64| {
            let from = arrivals.partition_point(|at| *at <= from);
            let until = arrivals.partition_point(|at| *at < until_ns);
            &arrivals[from.min(until)..until]
        };
        if !swap.opens {
            passed += between(swap.answered_ns).len();
            continue;
        }
        let Some(first) = between(swap.asked_ns).first() else {
            return Err(lost(format!(
                "no datagram arrived in the {} ms after update {number}, which allows traffic",
                (until_ns - swap.answered_ns) / 1_000_000
            )));
        };
        exchanged
            .effects_ns
            .push(first.saturating_sub(swap.answered_ns));
    }
    match passed {
        0 => Ok(exchanged),
        _ => Err(Failure {
            cause: FailureCause::Breach,
            message: format!("exchange: {passed} datagrams arrived after they were denied"),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn swap(opens: bool, asked_ns: u64) -> Swap {
        Swap {
            opens,
            asked_ns,
            answered_ns: asked_ns + 10,
        }
    }

    /// Denied at 100, allowed at 200, denied at 300, end at 400.
    fn evaluated(arrivals: &[u64]) -> Result<Exchanged, FailureCause> {
        let swaps = [swap(false, 100), swap(true, 200), swap(false, 300)];
        evaluate(&swaps, arrivals, 400).map_err(|failure| failure.cause)
    }

    #[test]
    fn effects_count_from_the_answer_and_are_never_negative() {
        let exchanged = evaluated(&[90, 99, 105, 110, 215, 250, 305]).unwrap();
        assert_eq!(exchanged.times_ns, [10, 10, 10]);
        assert_eq!(exchanged.effects_ns, [5]);
        // The first datagram arrives before the response to the update.
        assert_eq!(evaluated(&[205]).unwrap().effects_ns, [0]);
    }

    #[test]
    fn one_datagram_after_the_answer_is_a_breach() {
        assert_eq!(evaluated(&[111, 215]), Err(FailureCause::Breach));
        assert_eq!(evaluated(&[215, 399]), Err(FailureCause::Breach));
        assert!(
            evaluated(&[215, 400]).is_ok(),
            "arrivals after the end are ignored"
        );
    }

    #[test]
    fn an_update_that_never_allows_traffic_is_a_failure() {
        assert_eq!(evaluated(&[90, 100, 305]), Err(FailureCause::Network));
    }

    #[test]
    fn arrivals_are_stamped_on_the_monotonic_clock() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        setsockopt(&socket, ReceiveTimestampns, &true).unwrap();
        socket.set_read_timeout(Some(LOOK)).unwrap();
        let to = socket.local_addr().unwrap();
        let receiver = Receiver::default();
        let before = clock::monotonic_ns();
        let arrivals = thread::scope(|scope| {
            let received = scope.spawn(|| receiver.receive(&socket));
            socket.send_to(b"x", to).unwrap();
            receiver.await_arrival(1).unwrap();
            receiver.stop.store(true, Ordering::Relaxed);
            received.join().unwrap().unwrap()
        });
        // The conversion of a stamp is off by at most the bracket.
        assert_eq!(arrivals.len(), 1);
        assert!(arrivals[0] + BRACKET_NS >= before, "{arrivals:?} {before}");
        assert!(arrivals[0] <= clock::monotonic_ns());
    }
}
