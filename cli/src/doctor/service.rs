//! The installation and the server: files, address, template.

use std::{io, net::TcpStream, path::Path, time::Duration};

use super::{Finding, host::beside};
use crate::{failure::Failure, program::Context};

/// Address of an installed server.
const ADDRESS: &str = "127.0.0.1:3000";
/// Files that an installation has beside its programs.
const FILES: [&str; 5] = [
    "cube-api",
    "cube-image",
    "../guest/vmlinux",
    "../guest/initramfs.cpio",
    "../guest/base.erofs",
];
const DIAL: Duration = Duration::from_secs(2);

pub(super) fn findings(context: &Context, state: &Path) -> Result<Vec<Finding>, Failure> {
    Ok(vec![files(), template(state), server(context)?])
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

fn template(state: &Path) -> Finding {
    let manifest = state.join("installed/templates/base/manifest.json");
    match manifest.metadata() {
        Ok(_) => Finding::ok("template", "base is ready"),
        Err(why) if why.kind() == io::ErrorKind::PermissionDenied => Finding::warning(
            "template",
            format!("{}: {why}", state.display()),
            "run as root",
        ),
        Err(_) => Finding::warning(
            "template",
            "base has not been made",
            "start the server, which makes it: systemctl start cube-api (without systemd: cube-api prepare)",
        ),
    }
}

/// Whether the server answers, or may have its address.
fn server(context: &Context) -> Result<Finding, Failure> {
    let mut server = context.server()?;
    let url = server.url();
    if server.succeed("GET", "/health", b"").is_ok() {
        return Ok(Finding::ok("server", format!("{url} answers")));
    }
    let Ok(address) = ADDRESS.parse() else {
        return Ok(Finding::warning(
            "server",
            format!("{url} does not answer"),
            "start it",
        ));
    };
    Ok(match TcpStream::connect_timeout(&address, DIAL) {
        Ok(_) => Finding::missing(
            "server",
            format!("{url} does not answer, and a program listens on {ADDRESS}"),
            "see `ss -ltnp 'sport = :3000'` and `journalctl -u cube-api`; give the server another address: systemctl edit \
             cube-api.socket",
        ),
        Err(_) => Finding::warning(
            "server",
            format!("{url} does not answer; {ADDRESS} is free"),
            "systemctl start cube-api, then `journalctl -u cube-api` if it does not start",
        ),
    })
}
