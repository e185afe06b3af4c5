//! `cube-api ca`: creates certificates for a private server.

use std::path::PathBuf;

use api::tls::ca::{self, CaError};
use clap::Subcommand;

use super::{Failure, failure};

/// Port of the printed server and in the printed variables.
const PORT: u16 = 8443;

#[derive(Subcommand)]
pub(super) enum CaCommand {
    /// Create an authority and a certificate for DOMAIN, *.DOMAIN, localhost and the loopback addresses
    Init {
        /// Directory for the files; keys are readable only by their owner
        dir: PathBuf,
        /// The domain that clients use, without a port
        #[arg(long)]
        domain: String,
    },
}

pub(super) fn run(command: &CaCommand) -> Result<(), Failure> {
    let CaCommand::Init { dir, domain } = command;
    let files = ca::init(dir, domain).map_err(|why| match &why {
        CaError::Domain(_) | CaError::Exists(_) => failure(Failure::Usage, &why),
        CaError::Write { .. } => failure(Failure::UnsuitableHost, &why),
        CaError::Make(_) => failure(Failure::Bug, &why),
    })?;
    eprintln!(
        "server: cube-api serve --listen 0.0.0.0:{PORT} --domain {domain}:{PORT} \
         --set tls.certificate={} --set tls.key={}",
        files.certificate.display(),
        files.key.display()
    );
    eprintln!("clients:");
    print!("{}", files.environment(&format!("{domain}:{PORT}")));
    Ok(())
}
