//! The deserialized form of `[[mode.systems]]`, and its validation.

use serde::Deserialize;
use toml::Table;

use super::{ExecSpec, PeerSpec, target::TargetConfig};

/// Longest name of a peer. It is part of socket paths, which are limited to 108 bytes.
const MAX_NAME: usize = 24;
/// Maximum number of systems in addition to the target.
const MAX_PEERS: usize = 16;
/// Keys of a peer that are not keys of a target.
const OWN: [&str; 4] = ["name", "argv", "expect_stdout", "by"];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PeerConfig {
    name: String,
    #[serde(default)]
    argv: Vec<String>,
    expect_stdout: Option<String>,
    #[serde(default)]
    by: Vec<String>,
}

/// Validates all systems. Each entry has every key of a target.
pub(super) fn check(typed: Vec<Table>, exec: &ExecSpec) -> Result<Vec<PeerSpec>, String> {
    if typed.len() > MAX_PEERS {
        return Err(format!("the scenario has more than {MAX_PEERS} systems"));
    }
    let mut peers: Vec<PeerSpec> = Vec::new();
    for table in typed {
        let peer = check_one(table, exec)?;
        if peer.name == "target" || peers.iter().any(|other| other.name == peer.name) {
            return Err(format!("two systems have the name {:?}", peer.name));
        }
        peers.push(peer);
    }
    Ok(peers)
}

fn check_one(mut table: Table, exec: &ExecSpec) -> Result<PeerSpec, String> {
    let own: Table = OWN
        .into_iter()
        .filter_map(|key| Some((key.to_owned(), table.remove(key)?)))
        .collect();
    let peer: PeerConfig = own.try_into().map_err(|e| format!("mode.systems: {e}"))?;
    let name = peer.name;
    let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
    if name.is_empty() || name.len() > MAX_NAME || !name.bytes().all(plain) {
        return Err(format!(
            "mode.systems: {name:?} is not a name of 1 to {MAX_NAME} letters, digits, \"-\" and \"_\""
        ));
    }
    let target: TargetConfig = table
        .try_into()
        .map_err(|e| format!("system {name}: {}", one_line(&e)))?;
    let target = target
        .check()
        .map_err(|why| format!("system {name}: {}", why.replace("target.", "")))?;
    let exec = match (peer.argv.is_empty(), peer.expect_stdout) {
        (true, None) => exec.clone(),
        (true, Some(_)) => return Err(format!("system {name}: expect_stdout needs argv")),
        (false, expect) => ExecSpec {
            argv: peer.argv,
            cell: None,
            language: None,
            expect_stdout: expect.unwrap_or_else(|| exec.expect_stdout.clone()),
            ..exec.clone()
        },
    };
    Ok(PeerSpec {
        name,
        target,
        exec,
        by: peer.by,
    })
}

fn one_line(error: &toml::de::Error) -> String {
    error.message().replace('\n', " ")
}
