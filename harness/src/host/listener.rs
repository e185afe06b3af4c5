//! Finds the process that listens at an address: a measured server that was already running on this host.

use std::{
    collections::BTreeSet,
    fs,
    net::{ToSocketAddrs, UdpSocket},
};

use testbed::endpoint::Endpoint;

/// State LISTEN in /proc/net/tcp (include/net/tcp_states.h).
const LISTEN: &str = "0A";

/// Process id of the program that accepts connections to `server`. Of several processes that share the socket, it is the
/// one that started the others. `None` if the address is not of this host, or if the program is not visible.
#[must_use]
pub fn process_at(server: &Endpoint) -> Option<u32> {
    let authority = server.authority();
    // The authority leaves out the default port of the scheme.
    let default: u16 = if server.to_string().starts_with("https:") {
        443
    } else {
        80
    };
    let addresses = authority.to_socket_addrs();
    let addresses = addresses.or_else(|_| (authority.as_str(), default).to_socket_addrs());
    // A socket can be bound only to an address of this host.
    let is_local = |ip| UdpSocket::bind((ip, 0)).is_ok();
    let port = addresses.ok()?.find(|at| is_local(at.ip()))?.port();
    let sockets: BTreeSet<String> = ["/proc/net/tcp", "/proc/net/tcp6"]
        .into_iter()
        .filter_map(|table| fs::read_to_string(table).ok())
        .flat_map(|table| listeners(&table, port))
        .map(|inode| format!("socket:[{inode}]"))
        .collect();
    let owners: BTreeSet<u32> = processes()
        .filter(|pid| holds_any(*pid, &sockets))
        .collect();
    let parent = |pid: &u32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        Some(model::ProcessStat::parse(&stat)?.parent)
    };
    let mut first = owners.iter().copied();
    first.find(|pid| parent(pid).is_none_or(|parent| !owners.contains(&parent)))
}

/// Inodes of the sockets that listen on a port, from a table such as /proc/net/tcp (proc(5)).
fn listeners(table: &str, port: u16) -> Vec<String> {
    let lines = table.lines().skip(1);
    lines
        .filter_map(|line| {
            let fields: Vec<&str> = line.split_ascii_whitespace().collect();
            let (_, local) = fields.get(1)?.rsplit_once(':')?;
            let is_port = u16::from_str_radix(local, 16).ok()? == port;
            let is_listening = *fields.get(3)? == LISTEN;
            (is_port && is_listening).then(|| fields.get(9).copied().map(str::to_owned))?
        })
        .collect()
}

fn processes() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

fn holds_any(pid: u32, sockets: &BTreeSet<String>) -> bool {
    let files = fs::read_dir(format!("/proc/{pid}/fd"));
    let mut files = files.into_iter().flatten().flatten();
    files.any(|file| {
        let target = fs::read_link(file.path());
        target.is_ok_and(|target| target.to_str().is_some_and(|name| sockets.contains(name)))
    })
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn the_process_behind_a_url_of_this_host_is_found_and_others_are_not() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = |host: &str, port: u16| {
            process_at(&Endpoint::parse(&format!("http://{host}:{port}")).unwrap())
        };
        let port = listener.local_addr().unwrap().port();
        assert_eq!(at("127.0.0.1", port), Some(std::process::id()));
        assert_eq!(at("localhost", port), Some(std::process::id()));
        assert_eq!(
            at("192.0.2.1", port),
            None,
            "an address of no host (RFC 5737)"
        );
        drop(listener);
        assert_eq!(at("127.0.0.1", port), None, "nothing listens");
    }

    #[test]
    fn connections_and_other_ports_are_not_listeners() {
        let line = |port: &str, state: &str, inode: &str| {
            format!(
                "0: 0100007F:{port} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000 0 0 {inode} 1\n"
            )
        };
        let table = [
            "head\n".to_owned(),
            line("0BB8", "0A", "7"),
            line("0BB8", "01", "8"),
            line("0BB9", "0A", "9"),
        ];
        assert_eq!(listeners(&table.concat(), 3000), ["7"]);
    }
}
