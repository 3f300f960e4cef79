"""Who is in the job."""
