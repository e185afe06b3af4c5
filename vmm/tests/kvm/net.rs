//! A VM on a TAP in a separate network namespace. Inside, the addresses are 10.77.0.0/24.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, Shutdown, TcpStream},
    os::fd::{AsFd, OwnedFd},
    path::Path,
    process::Command,
    thread,
    time::Duration,
};

use nix::sched::{CloneFlags, unshare};

use crate::support::{TestVm, run_dir, sys::open_tap, until, vm::PATIENCE};

const HOST: &str = "10.77.0.1";
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
const PORT: u16 = 7777;
const BYTES: usize = 32 << 20;

/// Echoes everything that it receives, one connection after another.
const ECHO: &str = r#"
import socket, threading
server = socket.create_server(("10.77.0.2", 7777))
def echo(s):
    while data := s.recv(65536):
        s.sendall(data)
    s.close()
while True:
    threading.Thread(target=echo, args=(server.accept()[0],), daemon=True).start()
"#;

/// Runs `act` in a thread with its own network namespace, which disappears with the thread.
fn in_namespace(act: impl FnOnce() + Send + 'static) {
    let inside = move || {
        unshare(CloneFlags::CLONE_NEWNET).expect("a network namespace");
        act();
    };
    if let Err(panic) = thread::spawn(inside).join() {
        std::panic::resume_unwind(panic);
    }
}

/// Creates and configures a TAP with the host's address. Its MAC address is always the same, because a clone remembers
/// the MAC address of its template's peer.
fn tap() -> OwnedFd {
    let tap = open_tap("vm0").expect("a TAP");
    for args in [
        "link set lo up",
        "link set vm0 address 02:00:00:00:77:01",
        &format!("addr add {HOST}/24 dev vm0"),
        "link set vm0 up",
    ] {
        let status = Command::new("ip")
            .args(args.split(' '))
            .status()
            .expect("ip (package iproute2)");
        assert!(status.success(), "ip {args}");
    }
    tap
}

/// Byte `i` of the data.
fn pattern(i: usize) -> u8 {
    let bytes = (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    bytes[7]
}

fn connect() -> TcpStream {
    until(
        "the guest's server listens",
        Duration::from_secs(20),
        || TcpStream::connect_timeout(&(GUEST, PORT).into(), Duration::from_secs(2)).ok(),
    )
}

/// Sends [`BYTES`] to the guest and reads them back at the same time. Compares every byte.
fn exchange() {
    let stream = connect();
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    let mut sender = stream.try_clone().expect("a clone");
    let sending = thread::spawn(move || {
        let block: Vec<u8> = (0..BYTES).map(pattern).collect();
        sender.write_all(&block).expect("all is sent");
        sender.shutdown(Shutdown::Write).expect("an end");
    });
    let mut got = Vec::with_capacity(BYTES);
    (&stream).read_to_end(&mut got).expect("all comes back");
    sending.join().expect("the sender");
    assert_eq!(got.len(), BYTES);
    let wrong = got
        .iter()
        .enumerate()
        .find(|(i, byte)| **byte != pattern(*i));
    assert_eq!(wrong, None, "a byte changed in transit");
}

/// Exchanges data and pings with the guest.
fn talk(vm: &TestVm) {
    vm.sh(&format!("ping -c 5 -i 0.05 -W 2 {HOST}"));
    // Larger than a frame.
    vm.sh(&format!("ping -c 3 -i 0.05 -W 2 -s 8000 {HOST}"));
    exchange();
    vm.assert_healthy();
}

fn restore(template: &Path, tap: &OwnedFd) -> TestVm {
    let mut vm = TestVm::spawn();
    let spec = vm.restore_spec(template);
    vm.control()
        .restore(spec, Some(tap.as_fd()))
        .expect("a restore");
    vm.control().resume().expect("a resume");
    vm.identify();
    vm
}

pub(crate) fn net_a_guest_talks_over_its_tap() {
    in_namespace(|| {
        let tap = tap();
        let mut vm = TestVm::spawn();
        let spec = vm.spec();
        vm.control().boot(spec, Some(tap.as_fd())).expect("a boot");
        vm.identify();
        drop(tap);
        vm.sh(&format!(
            "ip addr add {GUEST}/24 dev eth0 && ip link set eth0 up"
        ));
        vm.agent()
            .write_file("/root/echo.py", ECHO.as_bytes(), Some("root"))
            .expect("an upload");
        vm.sh("python3 /root/echo.py >/dev/null 2>&1 </dev/null & disown");
        talk(&vm);
        // Many short connections.
        for i in 0..100_u8 {
            let mut stream = connect();
            stream.write_all(&[i; 100]).expect("a write");
            let mut back = [0; 100];
            stream.read_exact(&mut back).expect("a read");
            assert_eq!(back, [i; 100]);
        }
        let dir = run_dir::make("net").join("t");
        vm.control().snapshot(&dir).expect("a snapshot");
        drop(vm);
        // Two clones on another TAP: the server still listens, and the address is the same.
        for _ in 0..2 {
            let dir = dir.clone();
            in_namespace(move || {
                let tap = self::tap();
                let vm = restore(&dir, &tap);
                drop(tap);
                talk(&vm);
            });
        }
        // Without a TAP the guest keeps running.
        let vm = TestVm::clone_of(&dir);
        vm.sh(&format!("! ping -c 1 -W 1 {HOST}"));
        vm.assert_healthy();
    });
}

pub(crate) fn net_other_descriptors_than_taps_are_refused() {
    let (_reader, writer) = std::io::pipe().expect("a pipe");
    let mut vm = TestVm::spawn();
    let spec = vm.spec();
    let answer = vm.control().boot(spec, Some(writer.as_fd()));
    let failure = crate::support::vm::refusal(answer).expect_err("a refusal");
    assert_eq!(failure.kind, vmm_control::FailureKind::BadSpec, "{failure}");
    assert!(failure.message.to_lowercase().contains("tap"), "{failure}");
    assert!(!vm.vsock().exists());
}
