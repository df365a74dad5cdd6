//! `partage keep`: the keeper in the background. People do not type it; `partage run` does.

use super::Outcome;
use super::home::HomeArgs;
use clap::Args;
use partage_enforce::error_chain::describe;
use partage_workstation::client::{BUSY, READY};
use partage_workstation::keeper::{self, KeepError, Keeper, Options};
use partage_workstation::settings::Settings;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;

/// Keep the shares of a home, in the background
#[derive(Args)]
pub(crate) struct Keep {
    #[command(flatten)]
    home: HomeArgs,

    /// The settings
    #[arg(long, value_name = "FILE")]
    settings: Option<PathBuf>,

    /// Wait until nobody else keeps them
    #[arg(long)]
    standby: bool,
}

impl Keep {
    pub(crate) fn run(&self, out: &mut dyn Write) -> io::Result<Outcome> {
        // What it was started with open is not its own.
        partage_host::process_setup::close_inherited_files();
        // A thread that fails leaves half a keeper: the one who stands by is better.
        std::panic::set_hook(Box::new(|panic| {
            log(&format!("error: {panic}"));
            std::process::abort();
        }));
        // A terminal that goes away, or its Ctrl-C, is not meant for it. It may lead a session already.
        let _ = rustix::process::setsid();
        match self.start() {
            Ok(Some(keeper)) => {
                // Who started it may have left.
                let _ = writeln!(out, "{READY}").and_then(|()| out.flush());
                keeper.wait();
                Ok(Outcome::Fine)
            }
            Ok(None) => Ok(Outcome::Fine),
            Err(error) => {
                let words = if matches!(error, KeepError::Busy) { BUSY.into() } else { describe(&error) };
                log(&words);
                writeln!(out, "{}", words.replace('\n', " "))?;
                Ok(Outcome::Problems)
            }
        }
    }

    fn start(&self) -> Result<Option<Arc<Keeper>>, KeepError> {
        let home = self.home.home()?;
        let (settings, settings_file) = Settings::load(self.settings.as_deref(), &home)?;
        let options = Options { foreground: false, metrics: None, settings_file, log: Arc::new(log) };
        if self.standby {
            keeper::stand_by(&home, settings, options)
        } else {
            Keeper::start(&home, settings, options).map(Some)
        }
    }
}

fn log(words: &str) {
    // Standard error is the log of the home; where it is full, there is nobody to tell.
    let _ = crate::output::line(&mut io::stderr(), format_args!("{words}"));
}
