//! A guest with the network stack of Linux: a TAP in a separate network namespace, whose frames are copied to and from
//! the sandbox's TAP with their offload headers.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{Sender, channel},
    },
    thread::{self, JoinHandle},
};

use model::guest;
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sched::{CloneFlags, unshare},
};

use super::{
    sys::set_offloads,
    world::{Guest, command},
};
use crate::taps::device::{self, Device};

type Work = Box<dyn FnOnce() + Send>;

pub(crate) struct Stack {
    work: Option<Sender<Work>>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Stack {
    /// `offloads`: work that both sides leave to the reader of their frames (`TUN_F_…`).
    pub(crate) fn new(sandbox: &Guest, offloads: u32) -> Self {
        let (work, orders) = channel::<Work>();
        let (ready, card) = channel::<OwnedFd>();
        let stack = thread::spawn(move || {
            let device = set_up();
            ready.send(device.fd.try_clone().unwrap()).unwrap();
            orders.iter().for_each(|work| work());
        });
        let card = card.recv().unwrap();
        set_offloads(&card, offloads);
        set_offloads(&sandbox.fd, offloads);
        let stop = Arc::new(AtomicBool::new(false));
        let copy = |from: &OwnedFd, to: &OwnedFd| {
            let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
            let stop = Arc::clone(&stop);
            thread::spawn(move || copy_frames(&from, &to, &stop))
        };
        let threads = vec![copy(&card, &sandbox.fd), copy(&sandbox.fd, &card), stack];
        Self {
            work: Some(work),
            stop,
            threads,
        }
    }

    /// Runs `work` in the guest's namespace and returns its result.
    pub(crate) fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        let (done, result) = channel();
        let work = Box::new(move || done.send(work()).unwrap());
        self.work.as_ref().unwrap().send(work).unwrap();
        result.recv().expect("the work in the guest panicked")
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        drop(self.work.take());
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _panic_was_printed = thread.join();
        }
    }
}

fn set_up() -> Device {
    unshare(CloneFlags::CLONE_NEWNET).unwrap();
    let device = device::tap(guest::CARD).unwrap();
    let mac = |mac: [u8; 6]| mac.map(|b| format!("{b:02x}")).join(":");
    let card = ["dev", guest::CARD];
    let set = |arguments: &[&str]| command(&[arguments, &card].concat());
    device::configure("ipv6", guest::CARD, "addr_gen_mode", "1").unwrap();
    set(&["link", "set", "address", &mac(guest::MAC), "up"]);
    let v4 = format!("{}/{}", guest::IPV4, guest::IPV4_PREFIX);
    let v6 = format!("{}/{}", guest::IPV6, guest::IPV6_PREFIX);
    set(&["addr", "add", &v4]);
    set(&["addr", "add", &v6, "nodad"]);
    for gateway in [guest::GATEWAY4.to_string(), guest::GATEWAY6.to_string()] {
        let lladdr = mac(guest::GATEWAY_MAC);
        set(&["neigh", "replace", &gateway, "lladdr", &lladdr]);
        let family = if gateway.contains(':') { "-6" } else { "-4" };
        set(&[family, "route", "add", "default", "via", &gateway]);
    }
    device
}

fn copy_frames(from: &OwnedFd, to: &OwnedFd, stop: &AtomicBool) {
    let mut buffer = vec![0; 70_000];
    while !stop.load(Ordering::Relaxed) {
        let mut waiting = [PollFd::new(from.as_fd(), PollFlags::POLLIN)];
        if poll(&mut waiting, PollTimeout::from(50_u8)).unwrap_or(0) == 0 {
            continue;
        }
        let Ok(len) = nix::unistd::read(from, &mut buffer) else {
            return;
        };
        let _dropped_by_the_receiver = nix::unistd::write(to, &buffer[..len]);
    }
}
