//! The parameters with which a host is started.

use std::path::Path;

use crate::{clone_state::Variables, language::Start};

/// The parameters of a start.
#[derive(Debug)]
pub(crate) struct Setup<'a> {
    /// The directory in which the template installs the hosts.
    pub(crate) hosts: &'a Path,
    pub(crate) cwd: &'a str,
    pub(crate) how: Start,
    /// Variables in addition to the server's own.
    pub(crate) env: &'a Variables,
}
