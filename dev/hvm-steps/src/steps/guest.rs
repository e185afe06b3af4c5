//! Steps on a freshly booted VM: agent, disk, vsock, network.

use anyhow::{Result, bail, ensure};

use super::state::State;
use crate::{
    tap::{self, Tap},
    vm::{MEMORY, Vm},
};

pub(super) fn boot(state: &mut State<'_>) -> Result<String> {
    let tap = Tap::open()?;
    state.vm = Some(Vm::boot(state.config, (MEMORY, 1), Some(&tap))?);
    state.tap = Some(tap);
    Ok(String::new())
}

pub(super) fn exec(state: &mut State<'_>) -> Result<String> {
    let vm = state.vm()?;
    let clock = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    let output = vm.sh(&format!("uname -r; hostname; cat {clock}; whoami"))?;
    let lines: Vec<_> = output.lines().collect();
    let [release, hostname, clock, user] = lines[..] else {
        bail!("expected four lines, got {output:?}");
    };
    ensure!(
        hostname == vm.hostname && user == "root",
        "wrong host name or user: {output:?}"
    );
    ensure!(clock == "kvm-clock", "the guest's clock source is {clock}");
    Ok(format!("Linux {release}, {clock}"))
}

/// Writes 64 MiB and reads it back from the disk, with the page cache dropped in between.
pub(super) fn disk(state: &mut State<'_>) -> Result<String> {
    let sums = state.vm()?.sh("cd /var/tmp
        dd if=/dev/urandom of=a bs=1M count=4 status=none
        for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16; do cat a; done > b
        sync; cksum < b; echo 3 > /proc/sys/vm/drop_caches; cksum < b; rm b")?;
    let lines: Vec<_> = sums.lines().collect();
    ensure!(
        lines.len() == 2 && lines[0] == lines[1] && lines[0].ends_with(" 67108864"),
        "the checksums before and after differ: {sums:?}"
    );
    Ok("64 MiB written and read back".to_owned())
}

/// Writes a file through the agent and reads it back: bulk data on vsock in both directions.
pub(super) fn vsock(state: &mut State<'_>) -> Result<String> {
    const BYTES: u32 = 8 << 20;
    let data: Vec<u8> = (0..BYTES / 4)
        .flat_map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes())
        .collect();
    let vm = state.vm()?;
    let mut agent = vm.agent()?;
    agent.write_file("/tmp/echo", &data, Some("root"))?;
    let back = agent.read_file("/tmp/echo", Some("root"))?;
    ensure!(
        back == data,
        "the {} bytes read back differ from the {} bytes written",
        back.len(),
        data.len()
    );
    Ok("8 MiB there and back".to_owned())
}

pub(super) fn network(state: &mut State<'_>) -> Result<String> {
    let port = tap::echo_server()?;
    let (host, guest) = (tap::HOST, tap::GUEST);
    let vm = state.vm()?;
    vm.sh(&format!(
        "ip address add {guest}/30 dev eth0; ip link set eth0 up
        exec 3<>/dev/tcp/{host}/{port}
        head -c 2M /tmp/echo > /tmp/small; cat /tmp/small >&3 &
        head -c 2M <&3 | cmp - /tmp/small
        wait; exec 3>&-; rm /tmp/echo /tmp/small; ip address flush dev eth0"
    ))?;
    Ok("2 MiB there and back".to_owned())
}
