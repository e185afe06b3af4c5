//! A server in a separate process, for tests that kill it.

use std::{
    env,
    io::{IoSlice, IoSliceMut, Read},
    net::TcpListener,
    os::{
        fd::{AsFd, AsRawFd},
        unix::net::{UnixListener, UnixStream},
    },
    process::{Child, Command, Stdio},
    time::Duration,
};

use nix::{
    cmsg_space, libc,
    sys::socket::{ControlMessage, MsgFlags, recvmsg, sendmsg},
};

use super::{
    sys,
    world::{Guest, PEER4, config, eventually, ip},
};
use crate::{Isolation, IsolationConfig, Policy, TapIndex, enforcement::Enforcement, taps::reset};

/// Environment variables of the server process: the path of its socket, its instance name, the size of its stock, the
/// policy of its sandbox in JSON, and, if it has a proxy, the name for which `PEER4` is pinned.
const SOCKET: &str = "CUBE_TEST_SOCKET";
const INSTANCE: &str = "CUBE_TEST_INSTANCE";
const STOCK: &str = "CUBE_TEST_STOCK";
const POLICY: &str = "CUBE_TEST_POLICY";
const PINNED: &str = "CUBE_TEST_PINNED";

/// Starts a server process, which passes the TAP of one guest to this process, and its proxy's listener if it has one.
pub(crate) fn start_server(
    config: &IsolationConfig,
    policy: &Policy,
    pinned: Option<&str>,
) -> (Child, Guest, Option<TcpListener>) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let mut command = Command::new(env::current_exe().unwrap());
    command
        .args([
            "--exact",
            "tests::server::server_process_for_the_tests_that_kill_it",
        ])
        .env(SOCKET, &path)
        .env(INSTANCE, &config.instance)
        .env(STOCK, config.stock.to_string())
        .env(POLICY, serde_json::to_string(policy).unwrap())
        .stdout(Stdio::null());
    if let Some(name) = pinned {
        command.env(PINNED, name);
    }
    let child = command.spawn().unwrap();
    let (stream, _) = listener.accept().unwrap();
    let mut index = [0; 4];
    let mut space = cmsg_space!([i32; 2]);
    let mut buffers = [IoSliceMut::new(&mut index)];
    let message = recvmsg::<()>(
        stream.as_raw_fd(),
        &mut buffers,
        Some(&mut space),
        MsgFlags::MSG_CMSG_CLOEXEC,
    )
    .unwrap();
    let mut fds = sys::received(message.cmsgs().unwrap().next().unwrap()).into_iter();
    let guest = Guest {
        fd: fds.next().unwrap(),
        index: TapIndex(u32::from_ne_bytes(index)),
        sandbox: model::SandboxId::from_random([9; 19]),
    };
    (child, guest, fds.next().map(Into::into))
}

/// The server process of [`start_server`]. Without its environment variables this test does nothing.
#[test]
fn server_process_for_the_tests_that_kill_it() {
    let (Ok(socket), Ok(instance)) = (env::var(SOCKET), env::var(INSTANCE)) else {
        return;
    };
    let stock = env::var(STOCK).unwrap().parse().unwrap();
    let policy: Policy = serde_json::from_str(&env::var(POLICY).unwrap()).unwrap();
    let pinned = env::var(PINNED).ok();
    let config = IsolationConfig {
        instance,
        stock,
        proxy: pinned.is_some(),
        ..config()
    };
    let (isolation, _events) = Isolation::open(&config).unwrap();
    let tap = isolation.take().unwrap();
    let is_full = |maps: &mut Enforcement| maps.taps.ready_count() == stock as usize;
    eventually("the stock is full", || isolation.inspect(is_full));
    // A server killed before this leaves a TAP that is not removed with its VMM, only by a release.
    let flags = || reset::sys::tap_flags(tap.fd.as_fd()).unwrap();
    eventually("the TAP ends with its VMM", || {
        libc::c_int::from(flags()) & libc::IFF_PERSIST == 0
    });
    let sandbox = model::SandboxId::from_random([9; 19]);
    isolation.confine(tap.index, &sandbox, &policy).unwrap();
    let mut fds = vec![tap.fd.as_raw_fd()];
    let listener = pinned.map(|name| {
        let hour = Duration::from_secs(3600);
        let pinned = isolation.pin(tap.index, &sandbox, ip(PEER4), &name, hour);
        pinned.unwrap();
        isolation.proxy_listener().unwrap()
    });
    fds.extend(listener.iter().map(AsRawFd::as_raw_fd));
    let mut stream = UnixStream::connect(socket).unwrap();
    let index = tap.index.0.to_ne_bytes();
    let rights = [ControlMessage::ScmRights(&fds)];
    sendmsg::<()>(
        stream.as_raw_fd(),
        &[IoSlice::new(&index)],
        &rights,
        MsgFlags::empty(),
        None,
    )
    .unwrap();
    // Waits until this process is killed or the process that started it ends.
    stream
        .set_read_timeout(Some(Duration::from_secs(120)))
        .unwrap();
    let _end = stream.read(&mut [0]);
}
