//! Replacing a policy while the sandbox sends: what a replacement takes, when it works, and whether anything passes that
//! must not any more.
//!
//! The sandbox sends a datagram four times a millisecond. Each that gets outside has the kernel's stamp of its arrival there.
//! Replacements take turns: nothing is allowed, all is as before, nothing is allowed, and so on.

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

/// Between two datagrams of the sandbox, in microseconds.
const EVERY_US: u64 = 250;
/// From the order to the first datagram.
const PATIENCE: Duration = Duration::from_secs(20);
/// A look at whether it is over.
const LOOK: Duration = Duration::from_millis(10);
/// Two readings of one clock around one of the other may be so far apart.
const BRACKET_NS: u64 = 20_000;
/// As often is tried for that.
const TRIES: u32 = 20;
/// Starts a program that outlives the command.
const DETACHED: &str = "setsid \"$0\" \"$1\" >/dev/null 2>&1 </dev/null &";

/// A replacement of the policy.
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
    // A little longer than the replacements, which may be late.
    let lasts = every * count * 2 + PATIENCE;
    start(sandbox, to, lasts, like)?;
    let ear = Ear::default();
    let (swapped, arrivals) = thread::scope(|scope| {
        let heard = scope.spawn(|| ear.hear(&socket));
        let swapped = ear
            .await_arrival(1)
            .and_then(|()| swap_all(network, sandbox, &ear, count, every));
        ear.over.store(true, Ordering::Relaxed);
        let arrivals = heard
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        (swapped, arrivals)
    });
    let (swaps, end_ns) = swapped?;
    let arrivals = arrivals.map_err(|e| lost(format!("the peer outside: {e}")))?;
    judge(&swaps, &arrivals, end_ns)
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

/// All replacements, and when the time of the last one was over. After one that opens a datagram is waited for, so that
/// a sandbox that is late is not mistaken for one that is cut off.
fn swap_all(
    network: &Network,
    sandbox: &mut dyn Sandbox,
    ear: &Ear,
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
            ear.await_arrival(asked_ns)?;
        }
        // What is denied has some time to pass, however late the answer was.
        let every_ns = clock::nanoseconds(every);
        next_ns = (asked_ns + every_ns).max(swap.answered_ns + every_ns / 2);
    }
    clock::sleep_until(next_ns);
    Ok((swaps, next_ns))
}

/// Hears what the sandbox sends.
#[derive(Debug, Default)]
struct Ear {
    /// When the last datagram arrived; zero before the first.
    last_ns: AtomicU64,
    /// Nothing is to be heard any more.
    over: AtomicBool,
}

impl Ear {
    /// When each datagram arrived, until it is over.
    fn hear(&self, socket: &UdpSocket) -> io::Result<Vec<u64>> {
        let mut arrivals = Vec::new();
        let mut buffer = [0; 2048];
        let mut control = nix::cmsg_space!(TimeSpec);
        while !self.over.load(Ordering::Relaxed) {
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
            let stamp = stamp.ok_or_else(|| io::Error::other("a datagram has no stamp"))?;
            let arrived = monotonic(stamp)?;
            self.last_ns.store(arrived, Ordering::Relaxed);
            arrivals.push(arrived);
        }
        Ok(arrivals)
    }

    /// Waits for a datagram that arrives then or later.
    fn await_arrival(&self, from_ns: u64) -> Result<(), Failure> {
        let until = clock::monotonic_ns() + clock::nanoseconds(PATIENCE);
        while self.last_ns.load(Ordering::Relaxed) < from_ns {
            if clock::monotonic_ns() > until {
                return Err(lost(format!("no datagram came in {PATIENCE:?}")));
            }
            thread::sleep(LOOK / 10);
        }
        Ok(())
    }
}

/// A stamp of the wall clock as one of the clock that everything else is measured by. Both are read now, close to each
/// other, so that a wall clock that is being set right does no harm.
fn monotonic(stamp: TimeSpec) -> io::Result<u64> {
    for attempt in 1..=TRIES {
        let before = clock::monotonic_ns();
        let wall = clock::nanoseconds(clock_gettime(ClockId::CLOCK_REALTIME)?.into());
        let after = clock::monotonic_ns();
        if after - before <= BRACKET_NS || attempt == TRIES {
            // The earlier reading: an arrival is never made later than it was.
            return Ok((before + clock::nanoseconds(stamp.into())).saturating_sub(wall));
        }
    }
    Err(io::ErrorKind::Other.into())
}

/// What the arrivals say of the replacements. Rising, all of one clock; `end_ns` ends the time of the last one.
fn judge(swaps: &[Swap], arrivals: &[u64], end_ns: u64) -> Result<Exchanged, Failure> {
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
                "nothing passed in the {} ms after replacement {number}, which allows it",
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
            message: format!("exchange: {passed} datagrams passed after they were denied"),
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

    /// Closed at 100, open at 200, closed at 300; over at 400.
    fn judged(arrivals: &[u64]) -> Result<Exchanged, FailureCause> {
        let swaps = [swap(false, 100), swap(true, 200), swap(false, 300)];
        judge(&swaps, arrivals, 400).map_err(|failure| failure.cause)
    }

    #[test]
    fn effects_count_from_the_answer_and_none_is_early() {
        let exchanged = judged(&[90, 99, 105, 110, 215, 250, 305]).unwrap();
        assert_eq!(exchanged.times_ns, [10, 10, 10]);
        assert_eq!(exchanged.effects_ns, [5]);
        // Open before the customer has heard of it.
        assert_eq!(judged(&[205]).unwrap().effects_ns, [0]);
    }

    #[test]
    fn one_datagram_after_the_answer_is_a_breach() {
        assert_eq!(judged(&[111, 215]), Err(FailureCause::Breach));
        assert_eq!(judged(&[215, 399]), Err(FailureCause::Breach));
        assert!(judged(&[215, 400]).is_ok(), "after the end nobody knows");
    }

    #[test]
    fn what_never_opens_is_no_success() {
        assert_eq!(judged(&[90, 100, 305]), Err(FailureCause::Network));
    }

    #[test]
    fn arrivals_have_stamps_of_the_one_clock() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        setsockopt(&socket, ReceiveTimestampns, &true).unwrap();
        socket.set_read_timeout(Some(LOOK)).unwrap();
        let to = socket.local_addr().unwrap();
        let ear = Ear::default();
        let before = clock::monotonic_ns();
        let arrivals = thread::scope(|scope| {
            let heard = scope.spawn(|| ear.hear(&socket));
            socket.send_to(b"x", to).unwrap();
            ear.await_arrival(1).unwrap();
            ear.over.store(true, Ordering::Relaxed);
            heard.join().unwrap().unwrap()
        });
        // Between two readings of the clocks lies at most the bracket.
        assert_eq!(arrivals.len(), 1);
        assert!(arrivals[0] + BRACKET_NS >= before, "{arrivals:?} {before}");
        assert!(arrivals[0] <= clock::monotonic_ns());
    }
}
