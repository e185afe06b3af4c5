//! Options that all commands share.

use crate::{
    failure::Failure,
    output::Format,
    server::{Server, ServerArgs},
};

pub(crate) struct Context {
    pub(crate) args: ServerArgs,
    pub(crate) format: Format,
}

impl Context {
    pub(crate) fn server(&self) -> Result<Server, Failure> {
        self.args.server()
    }
}
