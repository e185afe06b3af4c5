//! `cube cluster`: the settings of a cluster are files on the server's host, so this runs `cube-api cluster` there.

use std::{ffi::OsString, os::unix::process::CommandExt, process::Command};

use clap::Args;

use crate::{
    failure::Failure,
    key::{PROGRAM, program},
};

#[derive(Args, Debug)]
#[command(disable_help_flag = true)]
pub(crate) struct ClusterArgs {
    /// init, token or join with options; `cube-api cluster --help` lists them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<OsString>,
}

pub(crate) fn run(args: &ClusterArgs) -> Result<(), Failure> {
    let why = Command::new(program())
        .arg("cluster")
        .args(&args.words)
        .exec();
    Err(Failure::host(format!("cannot run {PROGRAM}: {why}"))
        .with_cure("a host becomes a node there: run `cube-api cluster` on it"))
}
