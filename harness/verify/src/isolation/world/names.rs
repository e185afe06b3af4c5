//! The outside name server, at port 53 of every address. For each name, the zone lists the responses to successive
//! queries.

use std::{
    collections::HashMap,
    io::{self, Read, Write},
    net::{IpAddr, Ipv6Addr, TcpListener, TcpStream},
    sync::OnceLock,
    thread,
};

use netprobe::dns::{self, A, AAAA, CNAME, IN};
use serde::Deserialize;

use super::peers;

const ZONE: &str = include_str!("../../../isolation/zone.toml");

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    /// The response has a CNAME record for this name, followed by its addresses.
    alias: Option<String>,
    /// Addresses in each successive response. The last response repeats.
    #[serde(default)]
    answers: Vec<Vec<IpAddr>>,
    /// Time to live, in seconds.
    #[serde(default = "a_minute")]
    ttl: u32,
}

fn a_minute() -> u32 {
    60
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Zone {
    name: Vec<Entry>,
}

fn zone() -> &'static HashMap<String, Entry> {
    static ENTRIES: OnceLock<HashMap<String, Entry>> = OnceLock::new();
    ENTRIES.get_or_init(|| {
        // The zone is compiled in, and a test checks that it can be decoded.
        let zone: Zone = toml::from_str(ZONE).unwrap_or(Zone { name: Vec::new() });
        zone.name
            .into_iter()
            .map(|entry| (entry.name.clone(), entry))
            .collect()
    })
}

/// Serves in the network namespace of this thread until the process exits.
pub(super) fn serve() -> io::Result<()> {
    let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, 53))?;
    thread::spawn(move || peers::accept(&listener, connection));
    let socket = peers::datagrams(53)?;
    // Counts the queries for A records of each name. A query for AAAA does not advance the responses.
    let mut asked: HashMap<String, usize> = HashMap::new();
    thread::spawn(move || {
        peers::answer(&socket, |_, question| {
            let (name, kind) = read(question)?;
            let turn = asked.entry(name).or_default();
            let now = *turn;
            *turn += usize::from(kind == A);
            reply(question, now)
        });
    });
    Ok(())
}

fn connection(mut stream: TcpStream) -> io::Result<()> {
    loop {
        let mut length = [0; 2];
        stream.read_exact(&mut length)?;
        let mut question = vec![0; usize::from(u16::from_be_bytes(length))];
        stream.read_exact(&mut question)?;
        let Some(answer) = reply(&question, 0) else {
            return Ok(());
        };
        let length = u16::try_from(answer.len()).map_err(io::Error::other)?;
        stream.write_all(&[&length.to_be_bytes()[..], &answer].concat())?;
    }
}

/// Name and type of a query.
fn read(question: &[u8]) -> Option<(String, u16)> {
    let (name, after) = dns::read_name(question, 12)?;
    let kind = question.get(after..after + 2)?;
    Some((name, u16::from_be_bytes([kind[0], kind[1]])))
}

/// The response to query number `turn` for its name. `None` if the query cannot be decoded.
fn reply(question: &[u8], turn: usize) -> Option<Vec<u8>> {
    let (name, kind) = read(question)?;
    let end = dns::read_name(question, 12)?.1 + 4;
    let mut out = question.get(..end)?.to_vec();
    // Flags: response, authoritative, recursion desired and available. Counts: one question, no records yet.
    out[2] = 0x85;
    out[3] = 0x80;
    out[4..12].copy_from_slice(&[0, 1, 0, 0, 0, 0, 0, 0]);
    let Some(entry) = zone().get(&name) else {
        out[3] |= 3;
        return Some(out);
    };
    let mut records: u8 = 0;
    let mut owner = name.clone();
    let mut last = entry;
    while let Some(alias) = &last.alias {
        record(&mut out, &owner, CNAME, last.ttl, &dns::wire_name(alias));
        records += 1;
        owner.clone_from(alias);
        match zone().get(alias) {
            Some(next) if records < 32 => last = next,
            _ => break,
        }
    }
    let answers = last.answers.get(turn).or(last.answers.last());
    for address in answers.into_iter().flatten() {
        match (address, kind) {
            (IpAddr::V4(address), A) => record(&mut out, &owner, A, last.ttl, &address.octets()),
            (IpAddr::V6(address), AAAA) => {
                record(&mut out, &owner, AAAA, last.ttl, &address.octets())
            }
            _ => continue,
        }
        records += 1;
    }
    out[7] = records;
    Some(out)
}

fn record(out: &mut Vec<u8>, owner: &str, kind: u16, ttl: u32, data: &[u8]) {
    out.extend(dns::wire_name(owner));
    out.extend(kind.to_be_bytes());
    out.extend(IN.to_be_bytes());
    out.extend(ttl.to_be_bytes());
    out.extend(u16::try_from(data.len()).unwrap_or(0).to_be_bytes());
    out.extend(data);
}

#[cfg(test)]
mod tests {
    use super::*;
    use netprobe::RecordKind;

    fn ask(name: &str, turn: usize) -> dns::Answer {
        let question = dns::question(7, name, RecordKind::A);
        dns::answer(7, &reply(&question, turn).unwrap()).unwrap()
    }

    #[test]
    fn the_zone_decodes_and_gives_its_answers_in_order() {
        assert!(toml::from_str::<Zone>(ZONE).is_ok());
        assert_eq!(ask("unknown.test", 0).code, 3);
        assert_eq!(ask("ok.a.test", 0).addresses.len(), 1);
        let aliased = ask("alias.a.test", 0);
        assert_eq!(aliased.addresses, ask("target.b.test", 0).addresses);
        assert_ne!(ask("turns.a.test", 0), ask("turns.a.test", 1));
    }
}
