//! The installation and the server: files, address, template.

use std::{io, path::PathBuf, process::Command, time::Duration};

use super::{Finding, host::beside, options::Options};
use crate::{
    context::Context,
    failure::{Failure, Kind},
    server::{Server, ServerArgs},
};

/// Address of an installed server.
const ADDRESS: &str = "127.0.0.1:3000";
/// Timeout of a response; a program that is not a server may never send one.
const PATIENCE: Duration = Duration::from_secs(10);
const LOG: &str = "`journalctl -u cube-api`";
/// Files that an installation has next to its programs.
const FILES: [&str; 5] = [
    "cube-api",
    "cube-image",
    "../guest/vmlinux",
    "../guest/initramfs.cpio",
    "../guest/base.erofs",
];

pub(super) fn findings(context: &Context, options: &Options) -> Result<Vec<Finding>, Failure> {
    let unit = Unit::find();
    let address = unit.as_ref().map(|unit| &unit.address);
    let address = address
        .or(options.listen.as_ref())
        .map_or(ADDRESS, String::as_str);
    let scheme = if options.has_tls { "https" } else { "http" };
    let mut args = context.args.clone();
    if args.url.is_none() && args.domain.is_none() {
        args.url = Some(format!("{scheme}://{}", reachable(address)));
    }
    let server = server(&args, unit.as_ref(), look)?;
    Ok(vec![files(), template(&template_dirs(options)), server])
}

/// An address of this host at which a server that listens on the given address is reachable.
fn reachable(address: &str) -> String {
    address
        .replace("0.0.0.0:", "127.0.0.1:")
        .replace("[::]:", "[::1]:")
}

/// The socket of the installed server, which systemd holds.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Unit {
    address: String,
    /// State of the service: `active`, `inactive`, `failed`, …
    service: String,
}

impl Unit {
    /// `None`: systemd does not hold a socket of the server.
    fn find() -> Option<Self> {
        let mut systemctl = Command::new("systemctl");
        systemctl.args([
            "show",
            "--property=ActiveState,Listen",
            "cube-api.socket",
            "cube-api.service",
        ]);
        let output = systemctl.output().ok()?;
        Self::read(&String::from_utf8_lossy(&output.stdout))
    }

    /// Parses the properties of the socket, an empty line, and those of the service.
    fn read(shown: &str) -> Option<Self> {
        let (socket, service) = shown.split_once("\n\n")?;
        let of = |unit: &'_ str, name: &str| {
            let mut lines = unit.lines();
            lines.find_map(|line| Some(line.strip_prefix(name)?.strip_prefix('=')?.to_owned()))
        };
        let listen =
            of(socket, "Listen").filter(|_| of(socket, "ActiveState").as_deref() == Some("active"));
        Some(Self {
            address: listen?.split_whitespace().next()?.to_owned(),
            service: of(service, "ActiveState")?,
        })
    }
}

fn files() -> Finding {
    let absent = FILES
        .iter()
        .map(|name| beside(name))
        .find(|path| !path.is_file());
    match absent {
        None => Finding::ok("files", "programs, kernel and root image are installed"),
        Some(path) => Finding::missing(
            "files",
            format!("{} does not exist", path.display()),
            "install the package again, or run this command from where it is installed",
        ),
    }
}

/// Directories of installed templates: where the server looks for them, and where a source checkout has them.
fn template_dirs(options: &Options) -> Vec<PathBuf> {
    let made = options.state.join("installed/templates");
    let usual = [
        beside("../templates"),
        // Seen from a program in target/debug or target/release.
        beside("../cube/templates"),
        made.clone(),
    ];
    match &options.templates {
        Some(named) => vec![named.clone()],
        None => usual
            .into_iter()
            .map(|dir| dir.canonicalize().unwrap_or(dir))
            // Only the last one is created if it does not exist.
            .filter(|dir| dir.is_dir() || *dir == made)
            .collect(),
    }
}

fn template(dirs: &[PathBuf]) -> Finding {
    let manifest = |dir: &PathBuf| dir.join("base/manifest.json").metadata();
    if let Some(dir) = dirs.iter().find(|dir| manifest(dir).is_ok()) {
        return Finding::ok("template", format!("base is ready in {}", dir.display()));
    }
    let denied = dirs.iter().find_map(|dir| {
        let why = manifest(dir).err()?;
        (why.kind() == io::ErrorKind::PermissionDenied).then(|| format!("{}: {why}", dir.display()))
    });
    if let Some(found) = denied {
        return Finding::warning("template", found, "run as root");
    }
    let looked: Vec<_> = dirs.iter().map(|dir| dir.display().to_string()).collect();
    Finding::warning(
        "template",
        format!("base has not been made: it is not in {}", looked.join(", ")),
        "start the server, which makes it: systemctl start cube-api (without systemd: cube-api prepare; in a source \
         checkout: cargo xtask prepare)",
    )
}

/// Result of probing an address.
enum Look {
    Answers,
    /// A program listens there, but does not respond like a server.
    Another(Failure),
    Nothing(Failure),
}

fn look(server: &mut Server) -> Look {
    match server.succeed("GET", "/health", b"") {
        Ok(_) => Look::Answers,
        Err(why) if server.is_listening() => Look::Another(why),
        Err(why) => Look::Nothing(why),
    }
}

/// Whether the server responds. Connects only if that starts nothing.
fn server(
    args: &ServerArgs,
    unit: Option<&Unit>,
    look: impl FnOnce(&mut Server) -> Look,
) -> Result<Finding, Failure> {
    let mut server = args.server()?.within(PATIENCE);
    let url = server.url();
    let of_unit = unit.filter(|unit| url.ends_with(&format!("//{}", reachable(&unit.address))));
    if let Some(unit) = of_unit {
        let waits = format!(
            "systemd listens at {url}, and the service is {}",
            unit.service
        );
        match unit.service.as_str() {
            "inactive" => {
                return Ok(Finding::ok(
                    "server",
                    format!("{waits}: the first request starts it"),
                ));
            }
            "active" | "reloading" => {}
            _ => return Ok(Finding::missing("server", waits, format!("see {LOG}"))),
        }
    }
    Ok(match look(&mut server) {
        Look::Answers => Finding::ok("server", format!("{url} answers")),
        // A server that rejects the request, or that this program does not trust.
        Look::Another(Failure {
            kind,
            message,
            cure: Some(cure),
        }) if kind != Kind::Unreachable => Finding::warning("server", message, cure),
        Look::Another(why) if of_unit.is_some() => {
            Finding::missing("server", why.message, format!("see {LOG}"))
        }
        Look::Another(why) => Finding::missing(
            "server",
            format!("a program listens there: {}", why.message),
            "`ss -ltnp` names it; end it, or give the server another address: systemctl edit cube-api.socket",
        ),
        Look::Nothing(why) => Finding::warning(
            "server",
            why.message,
            format!("systemctl start cube-api, then {LOG} if it does not start"),
        ),
    })
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::{super::Verdict, *};

    const SOCKET: &str = "Listen=127.0.0.1:3000 (Stream)\nActiveState=active\n\nActiveState=";

    fn at(url: &str) -> ServerArgs {
        ServerArgs {
            url: Some(url.to_owned()),
            ..ServerArgs::default()
        }
    }

    #[test]
    fn a_server_that_a_connection_would_start_is_left_alone() {
        let args = at("http://127.0.0.1:3000");
        for (state, verdict) in [("inactive", Verdict::Ok), ("failed", Verdict::Missing)] {
            let unit = Unit::read(&format!("{SOCKET}{state}\n"));
            let found = server(&args, unit.as_ref(), |_| panic!("it was looked at")).unwrap();
            assert_eq!(found.verdict, verdict);
            assert!(found.found.contains(state), "{found:?}");
        }
        let unit = Unit::read(&format!("{SOCKET}active\n"));
        let found = server(&args, unit.as_ref(), |_| Look::Answers).unwrap();
        assert_eq!(found.verdict, Verdict::Ok);
        assert_eq!(
            Unit::read("Listen=\nActiveState=inactive\n\nActiveState=inactive"),
            None
        );
        assert_eq!(Unit::read(""), None);
        assert_eq!(reachable("0.0.0.0:8443"), "127.0.0.1:8443");
    }

    #[test]
    fn another_program_at_the_address_is_told_from_none() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let args = at(&format!("http://{}", listener.local_addr().unwrap()));
        let peer = std::thread::spawn(move || listener.incoming().take(2).for_each(drop));
        let found = server(&args, None, look).unwrap();
        assert_eq!(found.verdict, Verdict::Missing, "{found:?}");
        assert!(found.found.contains("a program listens"), "{found:?}");
        peer.join().unwrap();
        let found = server(&args, None, look).unwrap();
        assert_eq!(found.verdict, Verdict::Warning, "{found:?}");
        assert!(found.found.contains("cannot connect"), "{found:?}");
    }
    #[test]
    fn a_template_is_found_where_the_server_looks_and_a_missing_one_names_the_places() {
        let dir = tempfile::tempdir().unwrap();
        let dirs = ["checkout", "state"].map(|name| dir.path().join(name));
        let missing = template(&dirs);
        assert_eq!(missing.verdict, Verdict::Warning);
        for dir in &dirs {
            assert!(missing.found.contains(dir.to_str().unwrap()), "{missing:?}");
        }
        for dir in &dirs {
            let base = dir.join("base");
            std::fs::create_dir_all(&base).unwrap();
            std::fs::write(base.join("manifest.json"), "{}").unwrap();
            let found = template(&dirs);
            assert_eq!(found.verdict, Verdict::Ok);
            assert!(found.found.ends_with(dir.to_str().unwrap()), "{found:?}");
            std::fs::remove_dir_all(base).unwrap();
        }
        let mut options = Options::default();
        options.state = "/srv/state".into();
        let usual = template_dirs(&options);
        assert_eq!(
            usual.last().unwrap(),
            &PathBuf::from("/srv/state/installed/templates")
        );
        options.templates = Some("/srv/t".into());
        assert_eq!(template_dirs(&options), [PathBuf::from("/srv/t")]);
    }
}
