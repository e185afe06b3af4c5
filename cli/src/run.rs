//! `cube run`: a fresh sandbox for one command. It is removed at the end, however the command ends.

use clap::Args;
use rest::{NewSandbox, Sandbox};

use crate::{
    attach::{self, AtEnd, LEASE, Order, Outcome, Signals},
    command_args::{CommandArgs, EgressArgs},
    context::Context,
    failure::{Failure, Kind},
    image::{self, ImageArgs, Pull},
    server::{SandboxRoute, Server, segment},
};

/// Default template.
pub(crate) const DEFAULT_TEMPLATE: &str = "base";

#[derive(Args, Debug)]
pub(crate) struct RunArgs {
    /// Template of the sandbox: name, name:tag or id [default: base]
    #[arg(long, value_name = "T")]
    template: Option<String>,
    #[command(flatten)]
    image: ImageArgs,
    #[command(flatten)]
    command_args: CommandArgs,
    #[command(flatten)]
    egress: EgressArgs,
    /// The command and its arguments; with -it, a shell if there is none
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "CMD"
    )]
    command: Vec<String>,
}

/// Returns the exit code of the command.
pub(crate) fn run(context: &Context, args: &RunArgs) -> Result<u8, Failure> {
    let signals = Signals::take_over();
    let order = args.command_args.order(&args.command)?;
    let mut server = context.server()?;
    let sandbox = match args.create(&mut server, &signals)? {
        Created::Sandbox(sandbox) => sandbox,
        Created::Interrupted(code) => return Ok(code),
    };
    let route = server.route(&sandbox)?;
    let id = route.id.clone();
    signals.at_end(AtEnd::KillSandbox(Box::new(server.another()), id.clone()));
    let result = match signals.received() {
        Some(code) => Ok(Outcome::left(code)),
        None => in_sandbox(&mut server, &route, &order, &signals),
    };
    let killed = server.delete(&format!("/sandboxes/{}", segment(&id)));
    let outcome = result?;
    match killed {
        // The sandbox may have been killed by a signal, or have reached its deadline.
        Err(why) if why.kind != Kind::NotFound => {
            eprintln!("cube: cannot kill sandbox {id}: {why}");
        }
        Err(_) | Ok(()) => {}
    }
    Ok(outcome.code)
}

fn in_sandbox(
    server: &mut Server,
    route: &SandboxRoute,
    order: &Order,
    signals: &Signals,
) -> Result<Outcome, Failure> {
    let mut client = server.agent(route)?;
    let outcome = attach::attach(&mut client, server, route, order, signals)?;
    if outcome.is_reusable {
        server.keep(client, route);
    }
    Ok(outcome)
}

enum Created {
    Sandbox(Sandbox),
    /// A signal arrived while the template was built. Contains the exit code.
    Interrupted(u8),
}

impl RunArgs {
    /// Creates the sandbox. An image whose template exists costs no further request.
    fn create(&self, server: &mut Server, signals: &Signals) -> Result<Created, Failure> {
        let Some(image) = self.image.image.as_deref() else {
            let template = self.template.as_deref().unwrap_or(DEFAULT_TEMPLATE);
            let sandbox = server.post("/v2/sandboxes", &self.request(template)?);
            return sandbox.map(Created::Sandbox).map_err(unknown_template);
        };
        let request = self.request(&image::template_name(image, self.image.memory))?;
        if self.image.pull == Pull::Missing {
            match server.post("/v2/sandboxes", &request) {
                Err(why) if why.kind == Kind::NotFound => {}
                sandbox => return sandbox.map(Created::Sandbox),
            }
        }
        match image::build(server, &self.image, image, signals)? {
            None => server.post("/v2/sandboxes", &request).map(Created::Sandbox),
            Some(code) => Ok(Created::Interrupted(code)),
        }
    }

    fn request(&self, template: &str) -> Result<NewSandbox, Failure> {
        let mut request = NewSandbox {
            template_id: template.to_owned(),
            timeout: i64::try_from(LEASE.as_secs()).ok(),
            ..NewSandbox::default()
        };
        self.egress.apply(&mut request)?;
        Ok(request)
    }
}

/// Adds the remedy to the response for a template that the server does not have.
pub(crate) fn unknown_template(failure: Failure) -> Failure {
    failure
        .if_not_found("`cube template list` shows the templates, `cube template build` makes one")
}
