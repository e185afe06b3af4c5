//! A small internet: a network namespace for the test and its server, and a second namespace with addresses from the
//! documentation ranges (RFC 5737, RFC 3849), connected by the uplink `up0`. Each namespace ends with its thread.

use std::{
    fs,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    process::Command,
    sync::mpsc::{Receiver, Sender, channel},
    thread,
};

use nix::{
    sched::{CloneFlags, unshare},
    unistd::gettid,
};

/// IPv4 address of an echo server on [`PORT`].
pub(crate) const NEAR: &str = "192.0.2.1";
/// IPv4 address of another echo server.
pub(crate) const FAR: &str = "198.51.100.1";
/// IPv6 address of another echo server.
pub(crate) const SIX: &str = "2001:db8::1";
/// Port of the echo servers.
pub(crate) const PORT: u16 = 8000;
/// Port of a bulk server at the same addresses. The client sends two 8-byte big-endian numbers: how many bytes it will
/// send, and how many it wants to receive.
pub(crate) const BULK: u16 = 8001;

/// The far side of the uplink; ends when dropped.
struct Beyond {
    _alive: Sender<()>,
}

/// Runs `test` in the namespace that has the uplink.
pub(crate) fn with_outside(test: impl FnOnce() + Send + 'static) {
    let inside = move || {
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        let _beyond = Beyond::join();
        test();
    };
    if let Err(panic) = thread::spawn(inside).join() {
        std::panic::resume_unwind(panic);
    }
}

/// Runs `ip` in the namespace of the calling thread.
pub(crate) fn ip(arguments: &str) -> String {
    let output = Command::new("ip").args(arguments.split(' ')).output();
    let output = output.unwrap();
    assert!(output.status.success(), "ip {arguments}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Number of VMMs with a TAP in the network namespace of the calling thread.
pub(crate) fn taps_of_vmms() -> usize {
    let namespace = |process: &str| fs::read_link(format!("/proc/{process}/ns/net")).ok();
    let ours = namespace("thread-self");
    let has_tap = |process: &str| {
        let program = fs::read_link(format!("/proc/{process}/exe")).unwrap_or_default();
        let infos = fs::read_dir(format!("/proc/{process}/fdinfo"));
        let texts = infos
            .into_iter()
            .flatten()
            .filter_map(|info| fs::read_to_string(info.ok()?.path()).ok());
        let is_tap = |text: &String| text.lines().any(|line| line.starts_with("iff:"));
        program.ends_with("cube-vmm")
            && namespace(process) == ours
            && texts.filter(is_tap).count() > 0
    };
    let processes = fs::read_dir("/proc").unwrap().flatten();
    processes
        .filter(|process| has_tap(&process.file_name().to_string_lossy()))
        .count()
}

/// Name of the TAP of a process.
pub(crate) fn tap_of(pid: u64) -> String {
    let infos = fs::read_dir(format!("/proc/{pid}/fdinfo")).unwrap();
    let mut texts = infos.map(|info| fs::read_to_string(info.unwrap().path()).unwrap());
    let name = |text: String| {
        let mut lines = text.lines();
        lines.find_map(|line| Some(line.strip_prefix("iff:")?.trim().to_owned()))
    };
    texts.find_map(name).unwrap()
}

impl Beyond {
    /// Creates the uplink and the far side.
    fn join() -> Self {
        let (alive, until_dropped) = channel();
        let (tell, hear) = channel();
        thread::spawn(move || live(&tell, &until_dropped));
        let thread = hear.recv().unwrap();
        ip("link set lo up");
        ip("link add up0 type veth peer name beyond");
        ip(&format!("link set beyond netns {thread}"));
        ip("address add 203.0.113.2/24 dev up0");
        ip("address add 2001:db8:0:1::2/64 dev up0 nodad");
        ip("link set up0 up");
        // The second message: the far side is configured.
        hear.recv().unwrap();
        ip("route add default via 203.0.113.1");
        ip("-6 route add default via 2001:db8:0:1::1");
        Self { _alive: alive }
    }
}

/// The thread of the far side: sends its thread id, and again once it is ready.
fn live(tell: &Sender<i32>, until_dropped: &Receiver<()>) {
    unshare(CloneFlags::CLONE_NEWNET).unwrap();
    tell.send(gettid().as_raw()).unwrap();
    ip("link set lo up");
    crate::process::until("the far end of the uplink", || {
        ip("-o link show").contains("beyond")
    });
    ip("address add 203.0.113.1/24 dev beyond");
    ip("address add 2001:db8:0:1::1/64 dev beyond nodad");
    for address in [NEAR, FAR] {
        ip(&format!("address add {address}/32 dev lo"));
    }
    ip(&format!("address add {SIX}/128 dev lo nodad"));
    ip("link set beyond up");
    listen(PORT, echo);
    listen(BULK, bulk);
    listen(80, crate::secrets::plain);
    listen(443, crate::secrets::tls);
    listen(crate::socks::SOCKS, crate::socks::serve);
    tell.send(0).unwrap();
    // Waits until `Beyond` is dropped, which closes the channel.
    let _ = until_dropped.recv();
}

fn listen(port: u16, serve: fn(TcpStream)) {
    let listener = TcpListener::bind(("::", port)).unwrap();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || serve(stream));
        }
    });
}

/// Serves one bulk transfer. Ends early if the client disconnects.
fn bulk(mut stream: TcpStream) {
    let mut sizes = [[0; 8]; 2];
    if stream.read_exact(sizes.as_flattened_mut()).is_err() {
        return;
    }
    let mut buffer = vec![0; 1 << 20];
    let [mut take, mut send] = sizes.map(u64::from_be_bytes);
    while take > 0 {
        match stream.read(&mut buffer) {
            Ok(n @ 1..) => take = take.saturating_sub(n as u64),
            Ok(0) | Err(_) => return,
        }
    }
    while send > 0 {
        let part = buffer.len().min(usize::try_from(send).unwrap());
        if stream.write_all(&buffer[..part]).is_err() {
            return;
        }
        send -= part as u64;
    }
}

fn echo(mut stream: TcpStream) {
    let mut buffer = [0; 1024];
    while let Ok(n @ 1..) = stream.read(&mut buffer) {
        if stream.write_all(&buffer[..n]).is_err() {
            return;
        }
    }
}
