python scripts/performance/setup_experiment.py -a acc -p part -m llama -mr llama31_405b -ng 1024 -g gb200 -c fp8_cs -tp 4 -pp 8 -cp 2 -vp 4 -mb 1 -gb 1536 -i img -t 00:15:00 -d
