//! `cube sandbox exec` and `shell`.

use clap::Args;

use crate::{
    attach::{self, AtEnd, Signals, is_terminal},
    command_args::CommandArgs,
    context::Context,
    failure::Failure,
};

#[derive(Args, Debug)]
pub(crate) struct ExecArgs {
    /// Id of the sandbox; a paused one is resumed
    #[arg(value_name = "ID")]
    id: String,
    #[command(flatten)]
    command_args: CommandArgs,
    /// The command and its arguments; with -it, a shell if there is none
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "CMD"
    )]
    command: Vec<String>,
}

#[derive(Args, Debug)]
pub(crate) struct ShellArgs {
    /// Id of the sandbox; a paused one is resumed
    #[arg(value_name = "ID")]
    id: String,
    /// User of the shell [default: the template's]
    #[arg(short, long, value_name = "NAME")]
    user: Option<String>,
}

/// Returns the exit code of the command.
pub(crate) fn exec(context: &Context, args: &ExecArgs) -> Result<u8, Failure> {
    let signals = Signals::take_over();
    signals.at_end(AtEnd::KillProcess);
    let order = args.command_args.order(&args.command)?;
    let mut server = context.server()?;
    let route = server.find(&args.id)?;
    let mut client = server.agent(&route)?;
    match signals.received() {
        Some(code) => Ok(code),
        None => {
            let ended = attach::attach(&mut client, &server, &route, &order, &signals);
            ended.map(|outcome| outcome.code)
        }
    }
}

pub(crate) fn shell(context: &Context, args: &ShellArgs) -> Result<u8, Failure> {
    if !is_terminal(std::io::stdin()) {
        return Err(
            Failure::usage("a shell needs a terminal as standard input").with_cure(
                "use `cube sandbox exec -i ID -- sh` to run the commands of a file or a pipe",
            ),
        );
    }
    let command_args = CommandArgs {
        interactive: true,
        tty: true,
        envs: Vec::new(),
        user: args.user.clone(),
        workdir: None,
        timeout: None,
    };
    let exec_args = ExecArgs {
        id: args.id.clone(),
        command_args,
        command: Vec::new(),
    };
    exec(context, &exec_args)
}
