//! The command `cube-api`.

mod cli;

fn main() -> std::process::ExitCode {
    cli::main()
}
