"""How do notebooks run and where do they go? Set-up, headless runs, pages, reports,
this machine.
"""
